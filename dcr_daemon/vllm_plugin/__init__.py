"""The plugin that runs inside vLLM's processes, so that a subscriber can change live weights over a private socket.

    VLLM_PLUGINS=dcr,dcr_endpoint DCR_SOCKET=/run/dcr/vllm.sock \\
        vllm serve MODEL --worker-extension-cls dcr_daemon.vllm_plugin.WorkerExtension

It runs in three processes. vLLM finds each part by itself; without `DCR_SOCKET` all of them do nothing:

    API server   `endpoint_plugin` (an endpoint plugin) starts `endpoint.py`. The subscriber's calls (`engine.messages`)
                 come in over the socket, go to EngineCore as utility calls, and their answers go back. `data_parallel`
                 merges the answers of several engines.
    EngineCore   `register` (a general plugin) installs `core/`. Utility calls come in; it pauses and resumes the
                 scheduler and sends `calls` to all workers.
    worker       `WorkerExtension` is mixed into vLLM's worker, with `worker/`, `loader/` and `weights/`. `calls` come
                 in through `collective_rpc`; it reads and writes the live weights.

`settings`, `compat`, `calls`, `job_flags` and `cpu_rig` are shared. `register` runs in every process of vLLM.

    DCR_SOCKET           absolute path of the private unix socket; switches the plugin on
    DCR_PAUSE            keep | wait | abort: what a swap does with requests in flight (keep)
    DCR_CACHES           reset | keep: prefix and encoder caches at a swap (reset)
    DCR_STAGE_CAP        bytes of host memory each worker may hold for one transaction (a share of its weights)
    DCR_LOADED_CAP       bytes of all tensors together that vLLM's loader computes with (a share of the model)
    DCR_BACKGROUND_CPUS  cores for the workers' background threads, as 0-3,8 (all allowed ones, at nice 19)
    DCR_GATE             port | health: keep the port shut until the engine is proved, or answer 503 at /health (port)
    DCR_WATCHDOG         seconds after which a worker that does not return ends the engine; 0 never (900)

Importing this package imports nothing else: vLLM ignores a plugin that fails to import, so everything that may fail
runs in `register`, whose errors end the process with their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcr_daemon.vllm_plugin.endpoint import Endpoint
    from dcr_daemon.vllm_plugin.worker.extension import WorkerExtension as WorkerExtension


def register() -> None:
    """The general plugin: installs the guards in EngineCore and the CPU rig. Runs in every process, maybe repeatedly.

    Raises `UnsupportedVllm`, which ends the process, if this vLLM or its command line cannot run the plugin.
    """
    import os

    from dcr_daemon.vllm_plugin.settings import Settings

    if Settings.read().socket is None:
        return
    from dcr_daemon.vllm_plugin import compat, cpu_rig
    from dcr_daemon.vllm_plugin.core import hooks

    compat.require_start(os.environ)
    hooks.install()
    cpu_rig.install()


def endpoint_plugin() -> Endpoint:
    """Factory of the endpoint plugin. It cannot be called `endpoint`: importing that module would replace it."""
    from dcr_daemon.vllm_plugin.endpoint import Endpoint
    from dcr_daemon.vllm_plugin.settings import Settings

    return Endpoint(Settings.read())


def __getattr__(name: str) -> Any:
    """Import `WorkerExtension` only when a worker asks for it: it needs torch. A worker does so before it loads its
    model: from then on what is derived from weights is followed, and memory is reserved before vLLM sizes its KV cache.
    """
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from dcr_daemon.vllm_plugin.loader import derived
    from dcr_daemon.vllm_plugin.worker import reserve
    from dcr_daemon.vllm_plugin.worker.extension import WorkerExtension

    derived.install()
    reserve.install()
    return WorkerExtension
