"""Every internal name of vLLM that the plugin uses, checked before anything is changed.

`register` calls it in every process of vLLM, and `derived.install` in the workers, before they load their model.
Promises: if a name is missing in this vLLM, the process does not start with the plugin enabled, and its message names
it; it never starts with only some of the guards. A name belongs in this table if a later vLLM may move it without
breaking its own public interface. Attributes of instances count: a class has one if its methods assign it.
"""

from __future__ import annotations

import dis
import importlib
import os
from inspect import signature
from types import FunctionType

#: module -> attributes, dotted from the module.
ENGINE_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.core": (
        "EngineCore.collective_rpc",
        "EngineCore.get_weight_version",
        "EngineCore.model_executor",
        "EngineCore.pause_scheduler",
        "EngineCore.resume_scheduler",
        "EngineCore.scheduler",
        "EngineCore.set_weight_version",
        "EngineCore.vllm_config",
        "EngineCoreProc.pause_scheduler",
        "EngineCoreProc.run_busy_loop",
        "DPEngineCoreProc.resume_scheduler",
        "DPEngineCoreProc.run_busy_loop",
    ),
    "vllm.v1.core.sched.interface": ("PauseState.UNPAUSED", "PauseState.PAUSED_NEW", "PauseState.PAUSED_ALL"),
    "vllm.v1.core.sched.scheduler": ("Scheduler.set_pause_state", "Scheduler.pause_state"),
    "vllm.v1.engine.async_llm": ("AsyncLLM.engine_core",),
    "vllm.v1.engine.core_client": ("AsyncMPClient.call_utility_all_async", "AsyncMPClient.client_index"),
    "vllm.v1.engine.exceptions": ("EngineDeadError",),
    "vllm.v1.executor.multiproc_executor": (
        "MultiprocExecutor.is_failed",
        "MultiprocExecutor.response_mqs",
        "MultiprocExecutor.workers",
        "WorkerProcHandle.proc",
    ),
    "vllm.config": ("ParallelConfig.worker_extension_cls",),
    "vllm.plugins.endpoint_plugins.interface": ("init_endpoint_plugins_state",),
    "vllm.platforms": ("current_platform.is_cpu",),
}

#: callables -> parameters we pass by name.
PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.v1.engine.core", "EngineCore.collective_rpc"): ("method", "args"),
    ("vllm.v1.engine.core", "EngineCoreProc.pause_scheduler"): ("mode", "clear_cache"),
}

#: What the workers use: configuration, load format, kernels of experts, and the function that changes weights after
#: loading.
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
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": (
        "UnquantizedFusedMoEMethod.moe_kernel",
        "UnquantizedFusedMoEMethod.unquantized_backend",
    ),
    "vllm.model_executor.layers.fused_moe.modular_kernel": ("FusedMoEKernel.fused_experts",),
    "vllm.config": (
        "KVTransferConfig.kv_connector",
        "ModelConfig.enable_sleep_mode",
        "ModelConfig.is_moe",
        "ModelConfig.quantization",
        "ModelConfig.use_mla",
        "OffloadConfig.prefetch",
        "OffloadConfig.uva",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.enable_elastic_ep",
        "ParallelConfig.enable_eplb",
        "SpeculativeConfig.method",
        "VllmConfig.kv_transfer_config",
        "VllmConfig.lora_config",
        "VllmConfig.offload_config",
        "VllmConfig.speculative_config",
    ),
    "vllm.config.offload": ("PrefetchOffloadConfig.offload_group_size", "UVAOffloadConfig.cpu_offload_gb"),
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory.get_connector_class",),
    "vllm.distributed.kv_transfer.kv_connector.v1": ("KVConnectorBase_V1.reset_cache",),
    "vllm.v1.worker.worker_base": ("WorkerBase.device", "WorkerBase.rank", "WorkerBase.vllm_config"),
    "vllm.v1.worker.gpu_worker": ("Worker.execute_dummy_batch", "Worker.execute_model", "Worker.model_runner"),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner.get_model",),
}

#: Where the workers reserve memory on a device.
RESERVE_NAMES: dict[str, tuple[str, ...]] = {"vllm.v1.worker.gpu_worker": ("Worker.determine_available_memory",)}

CPU_RIG_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm._custom_ops": ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"),
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
                found = fields.get(part) or getattr(value, part, None)
                if found is None and not (isinstance(value, type) and _assigns(value, part)):
                    gone.append(f"{module}.{attribute}")
                    break
                value = found
    return gone


def _assigns(owner: type, attribute: str) -> bool:
    """Whether a method of a class, or of its bases, assigns or annotates an attribute of the instance."""
    for kind in owner.__mro__:
        if attribute in vars(kind).get("__annotations__", {}):
            return True
        for method in vars(kind).values():
            code = dis.get_instructions(method) if isinstance(method, FunctionType) else ()
            if any(step.opname == "STORE_ATTR" and step.argval == attribute for step in code):
                return True
    return False


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
