"""Runs inside vLLM: EngineCore's half, the endpoint's socket, the worker's hands.

    VLLM_PLUGINS=dcr,dcr_endpoint DCR_SOCKET=/run/dcr/vllm.sock \\
        vllm serve MODEL --worker-extension-cls dcr_daemon.vllm_plugin.WorkerExtension

Three pieces that vLLM finds by itself: the general plugin `register` (in every process), the endpoint plugin
`endpoint_plugin` (in API servers), and `WorkerExtension` (in workers). Without `DCR_SOCKET` all of them do nothing.

    DCR_SOCKET           absolute path of the private unix socket; switches the plugin on
    DCR_PAUSE            keep | wait | abort: what a swap does with requests in flight (keep)
    DCR_CACHES           reset | keep: prefix and encoder caches at a swap (reset)
    DCR_STAGE_CAP        bytes of host memory each worker may hold for one transaction (2147483648)
    DCR_BACKGROUND_CPUS  cores for the workers' background threads, as 0-3,8 (all allowed ones, at nice 19)
    DCR_GATE             port | health: keep the port shut until the engine is proved, or let /health say 503 (port)
    DCR_WATCHDOG         seconds after which a worker that does not return ends the engine; 0 never (900)

Importing this package costs nothing: vLLM swallows a plugin that fails to import, so everything that may fail runs in
`register`, whose errors end the process with their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcr_daemon.vllm_plugin.endpoint import Endpoint
    from dcr_daemon.vllm_plugin.worker.extension import WorkerExtension as WorkerExtension


def register() -> None:
    """The general plugin: guards in EngineCore, the CPU rig. Runs in every process of vLLM, perhaps repeatedly.

    Raises `UnsupportedVllm`, which ends the process, if this vLLM or its command line cannot carry us.
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
    """Factory of the endpoint plugin. Not called `endpoint`: importing that module would take the name."""
    from dcr_daemon.vllm_plugin.endpoint import Endpoint
    from dcr_daemon.vllm_plugin.settings import Settings

    return Endpoint(Settings.read())


def __getattr__(name: str) -> Any:
    """`WorkerExtension` is imported by workers only: it needs torch."""
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from dcr_daemon.vllm_plugin.worker.extension import WorkerExtension

    return WorkerExtension
