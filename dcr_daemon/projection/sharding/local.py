"""Facts about a rank's tensor in memory that need no element: its memory, shape, dtype and placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcr_daemon.projection.sharding.zero3 import Partitioned

#: of one tensor: its name, the local shape, the dtype, its placements, and the mesh's shape and this rank's place in it
Entry = tuple[str, tuple[int, ...], str, tuple[str, ...], tuple[int, ...], tuple[int, ...]]
Signature = tuple[Entry, ...]


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor | Partitioned)


def local(tensor: Any) -> Any:
    """The rank's own memory of a tensor, DTensor or partitioned one, detached; never a copy."""
    if isinstance(tensor, Partitioned):
        return tensor.local
    tensor = tensor.detach()
    if hasattr(tensor, "placements"):
        tensor = tensor.to_local()
    waiting = getattr(tensor, "wait", None)  # a collective that FSDP has not waited for yet
    return waiting() if waiting is not None else tensor


def unreadable(tensor: Any) -> str:
    """Why a local tensor has no readable values in this process; "" if it has."""
    import torch

    if tensor.device.type == "meta":
        return "is on the meta device"
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}"
    return "is quantised" if tensor.is_quantized else ""


def encoded(tensor: Any) -> str:
    """Why the bits of a local tensor are not its values, though an export could have them; "" if they are."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(tensor).__name__}, which keeps its values in another form"
    return ""


def memory(tensor: Any) -> tuple[object, ...]:
    """Equal for two local tensors exactly if they are the same memory, read the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def signature(tensors: Mapping[str, Any]) -> Signature:
    """Shapes, dtypes and placements of the input tensors (DTensors as such) on this rank."""
    meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    return tuple(_entry(name, tensor, meshes) for name, tensor in tensors.items())


def _entry(name: str, tensor: Any, meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> Entry:
    if not is_tensor(tensor):  # new since the map was made: reported by name
        return name, (), type(tensor).__name__, (), (), ()
    dtype, placements = str(tensor.dtype), getattr(tensor, "placements", None)
    if isinstance(tensor, Partitioned):
        return name, tuple(tensor.local.shape), dtype, ("partitioned",), (tensor.ranks,), (tensor.rank,)
    if placements is None:
        return name, tuple(tensor.shape), dtype, (), (), ()
    mesh = tensor.device_mesh
    if id(mesh) not in meshes:
        meshes[id(mesh)] = tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
    shape, at = meshes[id(mesh)]
    return name, tuple(local(tensor).shape), dtype, tuple(map(str, placements)), shape, at


def changes(before: Signature, after: Signature) -> list[str]:
    """The differences in words; empty if there are none. The order of the tensors does not count."""
    old, new = {entry[0]: entry for entry in before}, {entry[0]: entry for entry in after}
    found = [f"{name} is gone" for name in old if name not in new]
    found += [f"{name} is new" for name in new if name not in old]
    for name in old.keys() & new.keys() if old != new else ():
        _, shape, dtype, placements, *mesh = new[name]
        _, old_shape, old_dtype, old_placements, *old_mesh = old[name]
        if shape != old_shape:
            found.append(f"{name} is {shape} here, and was {old_shape}")
        elif dtype != old_dtype:
            found.append(f"{name} is {dtype.removeprefix('torch.')}, and was {old_dtype.removeprefix('torch.')}")
        elif (placements, mesh) != (old_placements, old_mesh):
            now, was = (
                f"{', '.join(p) or 'not cut'} over {m[0]}" for p, m in ((placements, mesh), (old_placements, old_mesh))
            )
            found.append(f"{name} is {now} at {mesh[1]}, and was {was} at {old_mesh[1]}")
    return sorted(found)
