"""This rank's map of a Megatron model in memory: names, shapes and Megatron's own marks, compared with the closed
forms.

megatron-core is imported only to read the degrees (`grid_of_process`); any module tree that names and marks its
parameters as Megatron does is accepted. What does not fit is residual by name, with the reason; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcr_daemon.errors import Incompatible, UsageError
from dcr_daemon.projection.frameworks.megatron.configuration import check_configuration
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.shards import Spot, shard, spots
from dcr_daemon.projection.frameworks.megatron.splits import Padded, Replicated, Rows
from dcr_daemon.projection.frameworks.models.architecture import Architecture
from dcr_daemon.projection.region_map import Map, Shard
from dcr_daemon.projection.values import dtype_of

_WRAPPERS = ("module.", "_orig_mod.")  #: of DDP, Float16Module, torch.compile
_REPEATED = ("embedding.word_embeddings.weight", "output_layer.weight")  #: on later stages, tied to the owner's


@dataclass(frozen=True, slots=True)
class Megatron:
    """A Megatron run as one of its ranks sees it.

    Attributes:
        grid: degrees of the run.
        rank: this process in the grid's own order.
    """

    architecture: Architecture
    grid: Grid
    rank: int

    @classmethod
    def of_process(cls, architecture: Architecture, layers: Sequence[int] | None = None) -> Megatron:
        """Degrees and rank as Megatron's own process groups have them; see `grid_of_process`."""
        grid, rank = grid_of_process(layers)
        return cls(architecture, grid, rank)


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Attributes:
    map: shards in the order of the model; `residual` names canonical tensors that this rank should hold and does not
        hold as predicted.
    tensors: the model's own, by the names of the map's shards.
    unknown: parameters of the model that have no closed form, with their shapes. The checkpoint's index says
        whether something is missing because of them.
    """

    map: Map
    tensors: Mapping[str, Any]
    unknown: Mapping[str, tuple[int, ...]]


def shards_of(model: Any, architecture: Architecture, grid: Grid, rank: int) -> ChunkMap:
    """Map a rank's live model.

    Args:
        model: the rank's model, or its list of model chunks where stages are virtual.
        grid: degrees of the run; `grid_of_process` asks Megatron.
        rank: this process in the grid.

    Raises:
        Incompatible: the model was built from another architecture.
        UsageError: the degrees do not divide the architecture, or the number of chunks is not
            the grid's number of virtual stages.
    """
    check_configuration(_listed(model), architecture)
    chunks = _chunks(model, grid.vpp)
    shards: list[Shard] = []
    bound: dict[str, Any] = {}
    residual: dict[str, str] = {}
    seen: set[tuple[int, str]] = set()
    for spot in spots(architecture, grid, rank=rank):
        tensors = chunks[spot.chunk]
        name = next((name for name in spot.names if name in tensors), None)
        if name is None:
            reason = f"the model has no {' nor '.join(spot.names)}"
        else:
            seen.add((spot.chunk, name))
            called = _called(spot.chunk, name, grid.vpp)
            try:
                shards.append(_shard(spot, name, called=called, tensor=tensors[name]))
                bound[called] = tensors[name]
                continue
            except Incompatible as error:
                reason = error.message
        residual |= {target.spec.name: reason for target in spot.parameter.targets}
    unknown = {
        _called(number, name, grid.vpp): tuple(tensor.shape)
        for number, tensors in enumerate(chunks)
        for name, tensor in tensors.items()
        if (number, name) not in seen and name not in _REPEATED
    }
    kept = [one for one in shards if not residual.keys() & {region.name for region in one.regions}]
    return ChunkMap(Map(tuple(kept), residual), bound, unknown)


def named_chunks(model: Any, chunks: int) -> dict[str, Any]:
    """Everything of a rank's model that a checkpoint may hold, by the names of its map's shards; see `shards_of`."""
    return {
        _called(number, name, chunks): tensor
        for number, tensors in enumerate(_chunks(model, chunks))
        for name, tensor in tensors.items()
    }


def _called(chunk: int, name: str, chunks: int) -> str:
    return f"{chunk}.{name}" if chunks > 1 else name


def _listed(model: Any) -> Sequence[Any]:
    return model if isinstance(model, list | tuple) else [model]


def _chunks(model: Any, chunks: int) -> list[dict[str, Any]]:
    found = [_tensors(chunk) for chunk in _listed(model)]
    if len(found) != chunks:
        raise UsageError(f"{len(found)} model chunks for {chunks} virtual stages", hint="pass the list of all chunks")
    return found


def _tensors(model: Any) -> dict[str, Any]:
    """Parameters, and the one kind of buffer that checkpoints hold, by their names without wrappers.

    That buffer is fp32 from the router's first forward pass on, whatever `Float16Module` made of it. It is treated as
    fp32 from the start, so that its dtype is the same before and after the first step.
    """
    buffers = ((name, buffer.float()) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias"))
    return {_bare(name): tensor for name, tensor in (*model.named_parameters(), *buffers)}


def _bare(name: str) -> str:
    while start := next((start for start in _WRAPPERS if name.startswith(start)), ""):
        name = name[len(start) :]
    return name


def _shard(spot: Spot, name: str, *, called: str, tensor: Any) -> Shard:
    """Raises `Incompatible` where Megatron's marks, the shape or the dtype contradict the closed form."""
    spot = _as_laid_out(spot, name, tensor)
    return shard(spot, called, dtype_of(name, tensor))


def _as_laid_out(spot: Spot, name: str, tensor: Any) -> Spot:
    """The spot with the tensor's real shape, where runs differ. Megatron's marks must not contradict it.

    Latent projections are whole on every rank under Transformer Engine, and split by rows in Megatron's own layers. A
    vocabulary is padded at its end to whatever the run asked for, or not at all.
    """
    split, shape, old = spot.parameter.split, tuple(tensor.shape), spot.holder
    whole = (shape[0] * old.shares, *shape[1:]) if shape else ()
    if isinstance(split, Replicated) and shape != split.shape == whole:
        split = Rows(split.shape)
        holder = replace(old, replica=old.replica // old.shares, replicas=old.replicas // old.shares)
        spot = replace(spot, parameter=replace(spot.parameter, split=split), holder=holder)
    elif isinstance(split, Padded) and shape[1:] == split.shape[1:] and whole[0] >= split.shape[0]:
        spot = replace(spot, parameter=replace(spot.parameter, split=replace(split, multiple=shape[0])))
    predicted = spot.parameter.held(spot.holder.share, spot.holder.shares).shape
    if predicted != shape:
        raise Incompatible(f"{name} is {shape} where {predicted} was expected")
    axis = getattr(tensor, "partition_dim", -1)
    if getattr(tensor, "tensor_model_parallel", False) and axis >= 0 and spot.holder.shares > 1 and axis != split.axis:
        raise Incompatible(f"{name} is split along dimension {axis}, unlike expected")
    return spot


def grid_of_process(layers: Sequence[int] | None = None) -> tuple[Grid, int]:
    """Degrees and rank of this process, from Megatron's own process groups.

    Args:
        layers: of every pipeline chunk, where they are not equal.

    Raises:
        UsageError: megatron-core is not installed, or its groups do not exist yet.
    """
    try:
        from megatron.core import parallel_state
    except ImportError:
        raise UsageError("megatron-core is not installed here", hint="give the grid's degrees instead") from None
    if not parallel_state.model_parallel_is_initialized():
        raise UsageError("Megatron's process groups do not exist yet", hint="initialize_model_parallel comes first")
    grid = Grid(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp=parallel_state.get_context_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        stage_layers=tuple(layers) if layers else None,
    )
    return grid, _rank(parallel_state, grid)


def _rank(state: Any, grid: Grid) -> int:
    """Number in the grid's own order, from the coordinates: Megatron may have been given another order."""
    dense = state.get_data_parallel_rank() * grid.cp + state.get_context_parallel_rank()
    within = dense * grid.tp + state.get_tensor_model_parallel_rank()
    expert = within // grid.etp % grid.ep
    if (within % grid.etp, expert) != (
        state.get_expert_tensor_parallel_rank(),
        state.get_expert_model_parallel_rank(),
    ):
        raise Incompatible(
            "Megatron's process groups are not in their default order (tp-cp-ep-dp-pp)",
            hint="leave --use-tp-pp-dp-mapping and custom orders away",
        )
    return int(state.get_pipeline_model_parallel_rank() * grid.stage + within)
