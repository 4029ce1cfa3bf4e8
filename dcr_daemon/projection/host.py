"""The bits of torch tensors in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.runtime import ThreadLocal

_pinned = ThreadLocal[dict[str, Any]](dict)


def host_bits(tensor: Any) -> Bits:
    """The bits of a contiguous tensor as flat unsigned integers: its own memory on the CPU; from a GPU, a buffer of
    this thread, valid until its next call; from any other device a copy."""
    import torch

    flat = tensor.reshape(-1)
    if flat.device.type == "cuda":
        flat = _to_host(flat)
    return flat.cpu().contiguous().view(torch.uint8).numpy().view(bits_dtype(flat.element_size()))


def _to_host(flat: Any) -> Any:
    """Copy through a page-locked buffer of this thread: several times faster than a copy to pageable memory."""
    import torch

    size = flat.numel() * flat.element_size()
    buffers = _pinned.get()
    buffer = buffers.get("buffer")
    if buffer is None or buffer.numel() < size:
        buffer = buffers["buffer"] = torch.empty(max(size, 1 << 20), dtype=torch.uint8, pin_memory=True)
    host = buffer[:size]
    host.copy_(flat.view(torch.uint8), non_blocking=True)
    torch.cuda.current_stream(flat.device).synchronize()
    return host.view(flat.dtype)


def synchronize_devices(devices: Iterable[Any]) -> None:
    """Wait for the work that the calling thread has queued on these devices, since other threads read them next."""
    for device in {device for device in devices if device.type == "cuda"}:
        import torch

        torch.cuda.current_stream(device).synchronize()
