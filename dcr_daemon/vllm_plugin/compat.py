"""Every internal name of vLLM that the EngineCore half uses, checked before anything is changed.

Runs in every process of vLLM, called by `register`. Promises: if a name is missing in this vLLM, the process does not
start with the plugin enabled, and its message names it; it never starts with only some of the guards. Names that only
the workers use are checked there, at the first call. A name belongs in this table if a later vLLM may move it without
breaking its own public interface.
"""

from __future__ import annotations

import importlib
import os
from inspect import signature

#: module -> attributes, dotted from the module.
ENGINE_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.core": (
        "EngineCore.collective_rpc",
        "EngineCore.get_weight_version",
        "EngineCore.pause_scheduler",
        "EngineCore.resume_scheduler",
        "EngineCore.set_weight_version",
        "EngineCoreProc.pause_scheduler",
        "EngineCoreProc.run_busy_loop",
        "DPEngineCoreProc.resume_scheduler",
        "DPEngineCoreProc.run_busy_loop",
    ),
    "vllm.v1.core.sched.interface": ("PauseState.UNPAUSED", "PauseState.PAUSED_NEW", "PauseState.PAUSED_ALL"),
    "vllm.v1.core.sched.scheduler": ("Scheduler.set_pause_state", "Scheduler.pause_state"),
    "vllm.v1.engine.core_client": ("AsyncMPClient.call_utility_all_async",),
    "vllm.v1.engine.exceptions": ("EngineDeadError",),
    "vllm.plugins.endpoint_plugins.interface": ("init_endpoint_plugins_state",),
    "vllm.platforms": ("current_platform.is_cpu",),
}

#: callables -> parameters we pass by name.
PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.v1.engine.core", "EngineCore.collective_rpc"): ("method", "args"),
    ("vllm.v1.engine.core", "EngineCoreProc.pause_scheduler"): ("mode", "clear_cache"),
}

#: What the workers use of vLLM's loading: load format, and the function that changes weights after loading.
WORKER_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.model_loader.base_loader": ("process_weights_after_loading",),
    "vllm.model_executor.model_loader.utils": ("process_weights_after_loading",),
    "vllm.model_executor.model_loader.reload.layerwise": ("_place_kernel_tensors", "get_layerwise_info"),
    "vllm.model_executor.model_loader.reload.meta": ("restore_layer_on_meta",),
    "vllm.model_executor.model_loader.reload.utils": ("get_layer_params_buffers",),
    "vllm.model_executor.model_loader.reload.types": (
        "LayerReloadingInfo.can_load",
        "LayerReloadingInfo.kernel_non_persistent_buffers",
        "LayerReloadingInfo.kernel_tensors",
        "LayerReloadingInfo.reset",
    ),
    "vllm.config": ("OffloadConfig.uva", "OffloadConfig.prefetch", "SpeculativeConfig.method", "KVTransferConfig"),
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory.get_connector_class",),
    "vllm.distributed.kv_transfer.kv_connector.v1": ("KVConnectorBase_V1.reset_cache",),
}

CPU_RIG_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
}


class UnsupportedVllm(RuntimeError):
    """The plugin cannot run in this vLLM, or in a vLLM that was started this way."""


def missing(names: dict[str, tuple[str, ...]]) -> list[str]:
    """The dotted paths of those `names` that this vLLM lacks, in order."""
    gone: list[str] = []
    for module, attributes in names.items():
        try:
            root = importlib.import_module(module)
        except ImportError:
            gone.append(module)
            continue
        for attribute in attributes:
            value: object = root
            for part in attribute.split("."):
                fields = getattr(value, "__dataclass_fields__", {})  # a default may be None, or no attribute at all
                value = fields.get(part) or getattr(value, part, None)
                if value is None:
                    gone.append(f"{module}.{attribute}")
                    break
    return gone


def wrong_signatures(parameters: dict[tuple[str, str], tuple[str, ...]]) -> list[str]:
    """The callables that lack a parameter that we pass by name."""
    wrong: list[str] = []
    for (module, path), wanted in parameters.items():
        value: object = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        has = signature(value).parameters  # type: ignore[arg-type]  # a function, by the table
        wrong += [f"{module}.{path}({name}=)" for name in wanted if name not in has]
    return wrong


def require(names: dict[str, tuple[str, ...]]) -> None:
    """Raises `UnsupportedVllm` with every missing name at once."""
    gone = missing(names)
    if not gone and names is ENGINE_NAMES:
        gone = wrong_signatures(PARAMETERS)
    if gone:
        import vllm

        raise UnsupportedVllm(
            f"dcr: vLLM {vllm.__version__} lacks what this version of dcr-daemon needs: {', '.join(gone)}. "
            "Install a vLLM that docs/VLLM.md names, or a newer dcr-daemon; unset DCR_SOCKET to start without it."
        )


def require_start(environ: os._Environ[str] | dict[str, str]) -> None:
    """Refuse a start without one of the plugin's three parts: such an engine could never be proved.

    Raises `UnsupportedVllm` naming the variable to change.
    """
    plugins = [name.strip() for name in environ.get("VLLM_PLUGINS", "").split(",")]
    if "dcr_endpoint" not in plugins or "dcr" not in plugins:
        raise UnsupportedVllm(
            "dcr: DCR_SOCKET is set, but VLLM_PLUGINS does not name both plugins of DCR, so this engine could "
            "never be proved. Set VLLM_PLUGINS=dcr,dcr_endpoint (and your own plugins), or unset DCR_SOCKET."
        )
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise UnsupportedVllm(
            "dcr: the Rust front end loads no endpoint plugins, so DCR_SOCKET could not be opened. "
            "Unset VLLM_USE_RUST_FRONTEND or DCR_SOCKET."
        )
