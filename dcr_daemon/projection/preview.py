"""`dcr plan`: a projection predicted from a model's configuration and the degrees of parallelism, without weights.

In come an architecture, a trainer and a grid; out comes a `Preview` with bytes per class, per reason and per rank. It
is
exact and quick: equal parameters (all experts of all layers) are split once, and each is counted. Owners follow from
names, so bytes per rank are those of the real run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import UsageError
from dcr_daemon.projection.frameworks import modules
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.model import parameters
from dcr_daemon.projection.frameworks.megatron.parameter import Parameter
from dcr_daemon.projection.frameworks.megatron.shards import experts_of, value_of
from dcr_daemon.projection.frameworks.megatron.splits import Joined, QueryGroups, Split, held
from dcr_daemon.projection.frameworks.models.architecture import Architecture
from dcr_daemon.projection.owners import owner
from dcr_daemon.projection.values import Add, Bits, between

Trainer = Literal["megatron", "fsdp2", "zero3", "transformers"]
Rule = Literal["dcr", "paper"]
Class = Literal["bits", "cast", "add", "residual"]


@dataclass(frozen=True, slots=True)
class RankRegions:
    """Regions that each of `ranks` holds and one of them owns. A region's name is the number of its target."""

    ranks: Sequence[int]
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter of the whole model: its canonical tensors, each with the slice [base, base + size) that it holds."""

    kind: str
    form: Hashable  #: equal for items that are split in the same way
    targets: tuple[tuple[TensorSpec, int, int], ...]
    holders: list[RankRegions]
    how: Class
    why: str  #: why it is residual; empty if it is not


@dataclass(slots=True)
class KindSummary:
    """Sums over the tensors of one kind. `direct` and `residual` are bytes; `how` are the classes met."""

    kind: str
    tensors: int = 0
    direct: int = 0
    residual: int = 0
    regions: int = 0
    how: tuple[Class, ...] = ()
    why: str = ""

    @property
    def nbytes(self) -> int:
        return self.direct + self.residual


@dataclass(frozen=True, slots=True)
class Preview:
    """Attributes:
    classes: bytes by how they travel.
    reasons: bytes of what is residual, by reason.
    baseline: bytes of directly projected baseline, by rank.
    regions: that a rank owns, by rank.
    gaps: what keeps the ranks together from holding every element exactly once; empty for a sound plan.
    """

    architecture: Architecture
    world: int
    parameters: int  #: elements
    tensors: int
    rows: tuple[KindSummary, ...]
    classes: dict[Class, int]
    reasons: dict[str, int]
    baseline: tuple[int, ...]
    regions: tuple[int, ...]
    gaps: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def direct(self) -> int:
        return sum(row.direct for row in self.rows)


def preview(
    architecture: Architecture,
    trainer: Trainer,
    *,
    grid: Grid,
    rule: Rule = "dcr",
    dtype: str | None = None,
) -> Preview:
    """Plan a run.

    Args:
        grid: for all but Megatron only `tp` and `dp`.
        rule: "paper" sends what the published projection left to residual there, for comparison.
        dtype: of the trainer's parameters; the checkpoint's own by default, fp32 under FSDP2.

    Raises:
        UsageError: the degrees do not divide the model, or the trainer has no such degree.
    """
    if trainer == "megatron":
        return _sum(architecture, grid.world, _megatron(architecture, grid, rule=rule, dtype=dtype))
    if (grid.pp, grid.vpp, grid.cp, grid.ep, grid.etp) != (1, 1, 1, 1, 1):
        raise UsageError(f"{trainer} is planned with --tp and --dp alone", hint="--pp, --ep and others are Megatron's")
    if rule == "paper":
        raise UsageError("the published rule is about Megatron", hint="use --trainer megatron with --rule paper")
    if trainer == "zero3" and grid.tp > 1:
        raise UsageError("ZeRO-3 is planned without tensor parallelism", hint="leave --tp away")
    bare = replace(architecture, prediction=None)
    dtype = dtype or ("F32" if trainer == "fsdp2" else None)
    return _sum(bare, grid.tp * grid.dp, _modules(bare, trainer, grid=grid, dtype=dtype))


def _megatron(architecture: Architecture, grid: Grid, *, rule: Rule, dtype: str | None) -> Iterator[Item]:
    chunks, experts = grid.chunks(len(architecture.layers)), experts_of(architecture)
    splits: dict[tuple[Split, int], list[tuple[Region, ...]]] = {}
    for parameter in parameters(architecture):
        stage = grid.chunk_of(parameter.place, chunks) % grid.pp
        local = grid.local_expert(parameter, experts)
        ways = grid.tp if parameter.expert is None else grid.etp
        key = parameter.split, ways
        if key not in splits:
            parts = 1 if parameter.split.axis is None else ways
            parameter.held(0, ways)  # raises an error with the parameter's name if it cannot be split
            splits[key] = [held(parameter.split, part, ways).regions for part in range(parts)]
        ranks = [grid.replicas(parameter, stage, local[0] if local else 0, i) for i in range(len(splits[key]))]
        why = _paper(parameter) if rule == "paper" else ""
        spec = parameter.targets[0].spec
        value = value_of(parameter, dtype or spec.dtype)
        how: Class = "residual" if why else _class(value)
        pairs = zip(parameter.targets, parameter.split.sizes, strict=True)
        yield Item(
            parameter.kind,
            key,
            tuple((target.spec, target.base, size) for target, size in pairs),
            [RankRegions(r, regions) for r, regions in zip(ranks, splits[key], strict=True)],
            how,
            why,
        )


def _class(value: object) -> Class:
    return "bits" if isinstance(value, Bits) else "add" if isinstance(value, Add) else "cast"


def _paper(parameter: Parameter) -> str:
    """Why the published rule leaves a parameter to residual: it takes plain column, row, replicated and gated ones."""
    if parameter.kind in ("embedding", "output"):
        return "padded or tied"
    if isinstance(parameter.split, QueryGroups):
        return "query groups"
    if any(target.spec.elements != size for target, size in zip(parameter.targets, parameter.split.sizes, strict=True)):
        return "experts stacked"
    if isinstance(parameter.split, Joined) and len(parameter.split.sections) > len(parameter.targets):
        return "several sections"
    return "zero-centred" if parameter.add else ""


def _modules(architecture: Architecture, trainer: modules.Trainer, *, grid: Grid, dtype: str | None) -> Iterator[Item]:
    for module in modules.modules(architecture):
        world = grid.tp * grid.dp
        spec = module.targets[0]
        if trainer == "transformers":
            ways = grid.tp if module.form.axis is not None else 1
            sharers = [[r for r in range(world) if r % grid.tp == t or ways == 1] for t in range(ways)]
        elif trainer == "fsdp2" and module.form.axis is None:
            sharers = [[d * grid.tp + t for t in range(grid.tp)] for d in range(grid.dp)]
        else:
            sharers = [[rank] for rank in range(world)]
        holders = [RankRegions(r, modules.regions(module.form, trainer, r[0], grid.tp, grid.dp)) for r in sharers]
        targets = tuple((spec, 0, spec.elements) for spec in module.targets)
        how = _class(between(spec.name, dtype or spec.dtype, spec.dtype))
        yield Item(module.kind, module.form, targets, holders, how, "")


def _sum(architecture: Architecture, world: int, items: Iterator[Item]) -> Preview:
    rows: dict[str, KindSummary] = {}
    classes: dict[Class, int] = defaultdict(int)
    reasons: dict[str, int] = defaultdict(int)
    baseline, regions = [0] * world, [0] * world
    proof = _Proof()
    for item in items:
        row = rows.setdefault(item.kind, KindSummary(item.kind))
        nbytes = sum(size * spec.width for spec, _, size in item.targets)
        row.tensors += proof.add(item)
        classes[item.how] += nbytes
        row.how = tuple(dict.fromkeys((*row.how, item.how)))
        if item.how == "residual":
            row.residual, row.why = row.residual + nbytes, item.why
            reasons[item.why] += nbytes
            continue
        row.direct += nbytes
        for holder in item.holders:
            row.regions += len(holder.regions)
            for region in holder.regions:
                spec, base, _ = item.targets[int(region.name)]
                count = len(holder.ranks)
                rank = holder.ranks[owner(spec.name, base + region.dst, count) if count > 1 else 0]
                baseline[rank] += region.elements * spec.width
                regions[rank] += 1
    ordered = tuple(sorted(rows.values(), key=lambda row: -row.nbytes))
    return Preview(
        architecture, world, proof.elements, len(proof.slices), ordered, dict(classes), dict(reasons),
        tuple(baseline), tuple(regions), tuple(proof.gaps()),
    )  # fmt: skip


class _Proof:
    """Checks coverage in two steps: each pattern of regions covers its slices, and the slices tile the tensors."""

    def __init__(self) -> None:
        self.slices: dict[str, tuple[TensorSpec, list[tuple[int, int]]]] = {}
        self._patterns: set[Hashable] = set()
        self._broken: list[str] = []

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec, _ in self.slices.values())

    def add(self, item: Item) -> int:
        """Add an item; returns how many canonical tensors are new with it."""
        before = len(self.slices)
        for spec, base, size in item.targets:
            self.slices.setdefault(spec.name, (spec, []))[1].append((base, size))
        sizes = tuple(size for _, _, size in item.targets)
        pattern = item.form, sizes
        if pattern not in self._patterns:
            shapes = {str(i): (size,) for i, size in enumerate(sizes)}
            found = exactly_once((region for holder in item.holders for region in holder.regions), shapes)
            self._patterns.add(pattern)
            self._broken += [f"{item.targets[int(f.name)][0].name}: {f}" for f in found if f.name in shapes]
        return len(self.slices) - before

    def gaps(self) -> list[str]:
        untiled = [name for name, (spec, slices) in self.slices.items() if not _tiles(spec, sorted(slices))]
        return self._broken + [f"{name}: not exactly one source for each element" for name in untiled]


def _tiles(spec: TensorSpec, slices: list[tuple[int, int]]) -> bool:
    ends = [0, *(base + size for base, size in slices)]
    return ends[-1] == spec.elements and all(base == end for (base, _), end in zip(slices, ends, strict=False))
