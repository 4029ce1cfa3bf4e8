"""Reserves the memory of a worker's transactions: its size, and on a device the time, before vLLM sizes its KV cache.

Runs in the worker process. `install` is called before the worker is made. vLLM measures how much memory is free after
the model's profiling run and gives it to the KV cache; what is allocated before that run is left out of it. Memory that
is reserved later would come out of what vLLM left for its own forward passes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.vllm_plugin import compat, settings
from dcr_daemon.vllm_plugin.weights.arena import Arena, DeviceArena

MEASURE = "determine_available_memory"
ATTRIBUTE = "_dcr_device_arena"


class TransactionMemory:
    """The arenas of one worker, each kept as long as the asked size stays the same.

    `device_arena` may come from `reserve`, made before this object.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, device_arena: DeviceArena | None = None) -> None:
        self._model, self._device = model, device
        self._host: Arena | None = None
        self._on_device = device_arena

    @property
    def host(self) -> Arena:
        assert self._host is not None, "reserved at attach"
        return self._host

    def reserve_host(self, cap: int | None) -> None:
        """Raises `ResourceExhausted`."""
        size = settings.stage_cap(cap, weight_bytes(self._model))
        if self._host is not None and self._host.size == max(size, 8):
            return
        self._host = None
        try:
            self._host = Arena(size)
        except MemoryError:
            raise ResourceExhausted(
                f"cannot reserve {size} bytes for a transaction", hint="lower DCR_STAGE_CAP"
            ) from None

    def reserve_device(self, cap: int | None) -> DeviceArena | None:
        """The arena on the model's device, None if that is the host. Raises `ResourceExhausted`."""
        if self._device.type == "cpu":
            return None
        size = settings.stage_cap(cap, weight_bytes(self._model))
        if self._on_device is None or self._on_device.cap != size:
            self._on_device = None
            self._on_device = _device_arena(size, self._device)
        return self._on_device


def _device_arena(cap: int, device: torch.device) -> DeviceArena:
    try:
        return DeviceArena(cap, device)
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(
            f"cannot reserve memory on {device} for a transaction of {cap} bytes: {error}",
            hint="lower DCR_STAGE_CAP, or vLLM's --kv-cache-memory-bytes if you set it",
        ) from None


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, shared storage once."""
    storages = (parameter.untyped_storage() for parameter in model.parameters())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def install() -> None:
    """Let every worker of this process that serves on a device reserve its arena there. Repeatable.

    Raises `UnsupportedVllm` if this vLLM's worker has no such method.
    """
    compat.require(compat.RESERVE_NAMES)
    from vllm.v1.worker.gpu_worker import Worker  # the CPU's worker has a method of its own

    original = getattr(Worker, MEASURE)
    if getattr(original, "reserves", False):
        return

    @functools.wraps(original)
    def determine_available_memory(worker: Any) -> Any:
        reserve(worker)
        return original(worker)

    determine_available_memory.reserves = True  # type: ignore[attr-defined]  # marks our own wrapper
    setattr(Worker, MEASURE, determine_available_memory)


def reserve(worker: Any) -> None:
    """Make the worker's arena on its device, if the plugin is switched on. Raises `ResourceExhausted`."""
    asked = settings.Settings.read()
    if asked.socket is None or worker.device.type == "cpu" or worker.__dict__.get(ATTRIBUTE) is not None:
        return
    cap = settings.stage_cap(asked.stage_cap, weight_bytes(worker.model_runner.get_model()))
    worker.__dict__[ATTRIBUTE] = _device_arena(cap, worker.device)
