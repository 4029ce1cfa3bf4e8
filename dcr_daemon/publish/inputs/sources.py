"""Where the new bits of a tensor come from: a safetensors file, or a tensor of the training process.

A source is read in slices from worker threads and always answers in the canonical dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.projection import host
from dcr_daemon.projection.values import dtype_names, torch_dtype
from dcr_daemon.publish.inputs.cast import cast_bits


class Source(Protocol):
    @property
    def given(self) -> TensorSpec:
        """Name, dtype and shape as the input has them."""
        ...

    def read(self, start: int, count: int, dtype: str) -> Bits:
        """`count` elements from number `start` in row-major order, as bits of `dtype`; called on any thread."""
        ...


class SourceChanged(Corrupt):
    """A file is not what it was when it was taken up: the attempt is void, and the input may be tried again."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A tensor of a safetensors file. Copied by `pread`: the file is somebody else's and may shrink.

    Reading raises `SourceChanged` if it does, or if it cannot be read any more.
    """

    file: SafetensorsFile
    given: TensorSpec

    def read(self, start: int, count: int, dtype: str) -> Bits:
        try:
            bits = self.file.read(self.given.name, start, count)
        except (Corrupt, OSError) as error:
            raise SourceChanged(f"{self.file.path} cannot be read to its end: {error}") from error
        return cast_bits(bits, self.given.dtype, canonical=dtype)


class TensorSource:
    """A torch tensor, on any device, that does not change until it was read.

    Raises:
        Incompatible: a DTensor with real shards, a sparse, quantised or meta tensor: there are no local bits.
    """

    def __init__(self, name: str, tensor: Any) -> None:
        tensor = local_tensor(name, tensor)
        dtype = dtype_names().get(tensor.dtype)
        if dtype is None:
            raise Incompatible(f"{name} has dtype {tensor.dtype}, which no safetensors checkpoint holds")
        self.given = TensorSpec(name, dtype, tuple(int(n) for n in tensor.shape))
        self._tensor = tensor

    @property
    def device(self) -> Any:
        return self._tensor.device

    def contiguous(self) -> TensorSource:
        """This source, with its elements side by side: a copy if they are not. For use right before reading."""
        return self if self._tensor.is_contiguous() else TensorSource(self.given.name, self._tensor.contiguous())

    def aliases(self, other: TensorSource) -> bool:
        """Whether both are the same memory, read the same way."""
        return self._memory() == other._memory()

    def _memory(self) -> tuple[object, ...]:
        t = self._tensor
        return t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()

    def read(self, start: int, count: int, dtype: str) -> Bits:
        return host.host_bits(self._tensor.reshape(-1)[start : start + count].to(torch_dtype(dtype)))


def local_tensor(name: str, tensor: Any) -> Any:
    """`tensor`, detached, with all of its values in this process; `Incompatible` if they are not."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Incompatible(f"{name} is a {type(tensor).__name__}, not a tensor", hint="publish (name, tensor) pairs")
    tensor = tensor.detach()
    placements = getattr(tensor, "placements", None)
    if placements is not None and hasattr(tensor, "to_local"):
        mesh = tensor.device_mesh
        if mesh.size() != 1 and not all(p.is_replicate() for p in placements):
            raise Incompatible(
                f"{name} is a DTensor sharded over {mesh.size()} ranks",
                hint="make a Publisher on every rank, each publishes what it holds; or gather the weights on one "
                "of them, and publish (name, parameter.full_tensor()) pairs there",
            )
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Incompatible(f"{name} is a {tensor.layout} tensor on {tensor.device} without plain bits of its own")
    return tensor.resolve_conj().resolve_neg()


def synchronize_sources(sources: Iterable[TensorSource]) -> None:
    """Wait for work that the calling thread has queued on the devices of `sources`: other threads read them next."""
    host.synchronize_devices(source.device for source in sources)
