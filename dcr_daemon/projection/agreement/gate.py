"""The start-up gate: whether the ranks of a group together publish every element of the checkpoint exactly once.

`judge` reads one declaration of every rank (declaration.py) and gives the verdict that all of them follow: which
canonical tensors are residual and why, who owns each, which travel as overwrites. It guesses and
repairs nothing: a tensor without exactly one source for each element becomes residual, by name, if the framework can
export it; otherwise nothing is published, and the error names the ranks to look at. Pure: the same declarations give
the same verdict.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.tied import FOLLOWS, is_head
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.agreement.coverage import Fault, check
from dcr_daemon.projection.agreement.declaration import (
    MAX_WORLD,
    Declaration,
    declare,
    decode_declaration,
    encode_declaration,
)
from dcr_daemon.untrusted import decode, decompress_bounded
from dcr_daemon.wording import shorten, shorten_ranks

__all__ = [
    "Declaration", "Verdict", "declare", "decode_declaration", "decode_verdict", "encode_declaration", "encode_verdict",
    "judge",
]  # fmt: skip

PACKED_LIMIT = 64 << 20  #: bytes of an encoded verdict
UNPACKED_LIMIT = 512 << 20

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class Residue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A canonical tensor that is exported whole: why, which rank owns it, and whether it travels as an overwrite."""

    why: str
    owner: _Rank
    overwrite: bool


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Attributes:
    nonces: of the declarations judged, by rank; a rank that finds another nonce than its own was not judged.
    maps: SHA-256 (hex) over the ranks' map digests: equal exactly if the group projects in the same way.
    export: how all ranks construct residual tensors: "hook", "own", or "" where they cannot.
    direct_bytes, boxes: canonical bytes that ranks project by themselves, and in how many boxes.
    follows: tensors that no rank holds, each with the one that it is tied to: who is the source of an element of that
        one is the source of the same element of both.
    """

    group: str
    call: _Count
    attempt: _Count
    layout: str
    nonces: tuple[str, ...]
    maps: str
    export: str
    residues: dict[_Name, Residue]
    direct_bytes: _Count
    residual_bytes: _Count
    boxes: _Count
    follows: dict[_Name, _Name] = {}

    @property
    def residual(self) -> dict[str, str]:
        """Residual tensors in layout order, with reasons."""
        return {name: residue.why for name, residue in self.residues.items()}

    @property
    def overwrites(self) -> frozenset[str]:
        return frozenset(name for name, residue in self.residues.items() if residue.overwrite)

    def owned(self, rank: int) -> tuple[str, ...]:
        """Residual tensors that `rank` diffs and publishes, in layout order."""
        return tuple(name for name, residue in self.residues.items() if residue.owner == rank)

    def admits(self, declaration: Declaration) -> bool:
        """Whether this verdict judged that very declaration."""
        same = (self.group, self.call, self.attempt) == (declaration.group, declaration.call, declaration.attempt)
        return same and declaration.rank < len(self.nonces) and self.nonces[declaration.rank] == declaration.nonce

    def report(self, layout: Layout) -> str:
        """The verdict for people, with the terms of `dcr plan`: a line each for direct, residual, and every reason."""
        total = self.direct_bytes + self.residual_bytes
        ranks = f"{len(self.nonces)} rank{'s' if len(self.nonces) > 1 else ''}"
        lines = [f"direct    {_share(self.direct_bytes, total)} by {ranks}, {self.boxes:,} regions"]
        if not self.residues:
            return "\n".join([*lines, "residual  none"])
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, residue in self.residues.items():
            by_reason[residue.why].append(name)
        lines.append(f"residual  {_share(self.residual_bytes, total)}, {len(self.residues):,} tensors")
        sizes = {name: layout[layout.index(name)].nbytes for name in self.residues}
        for why, names in sorted(by_reason.items(), key=lambda item: -sum(sizes[name] for name in item[1])):
            lines.append(f"          {_share(sum(sizes[n] for n in names), total)} {why}: {shorten(names)}")
        return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3%}" if whole else "-"


def encode_verdict(verdict: Verdict) -> bytes:
    """Msgpack, compressed with zstd."""
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(verdict))


_verdicts = msgspec.msgpack.Decoder(Verdict)


def decode_verdict(body: bytes) -> Verdict:
    """Read `encode_verdict` back. Raises `ValueError` for anything that is no verdict."""
    verdict = decode(
        _verdicts, decompress_bounded(body, "a verdict", packed_limit=PACKED_LIMIT, unpacked_limit=UNPACKED_LIMIT)
    )
    if any(residue.owner >= len(verdict.nonces) for residue in verdict.residues.values()):
        raise ValueError("it gives a tensor to a rank that does not exist")
    if verdict.follows.keys() & {*verdict.follows.values(), *verdict.residues}:
        raise ValueError("a tensor that follows another one has a source of its own")
    return verdict


def judge(declarations: Iterable[Declaration], layout: Layout, *, tied: Collection[tuple[str, str]] = ()) -> Verdict:
    """Whether the group may publish, and how.

    Args:
        declarations: of every rank of one group, call and attempt, in any order.
        tied: pairs of tensors of one shape and dtype, of which the ranks may hold either.

    Raises:
        Incompatible: a rank is missing or belongs elsewhere, or a tensor has no way into the stream. The message names
            tensors, elements and ranks.
    """
    ranks = sorted(declarations, key=lambda declaration: declaration.rank)
    _check_group(ranks, layout)
    reasons = _reasons(ranks)
    skip = np.zeros(len(layout), np.bool_)
    skip[[layout.index(name) for name in reasons]] = True
    coverage = check(ranks, layout, skip)
    follows = _follows(coverage.faults, reasons, tied=tied, layout=layout)
    faults = [fault for fault in coverage.faults if layout[fault.tensor].name not in follows]
    builders = _Builders(ranks, layout)
    _check_faults([fault for fault in faults if not builders.of(fault.tensor).size], layout)
    if coverage.faults:
        reasons |= {layout[fault.tensor].name: str(fault) for fault in faults}
        skip[[fault.tensor for fault in coverage.faults]] = True
        coverage = check(ranks, layout, skip)
    _check_buildable(reasons, builders, layout)
    direct_bytes = coverage.nbytes + _nbytes(follows, layout)
    residual_bytes = _nbytes(reasons, layout)
    if coverage.faults or direct_bytes + residual_bytes != layout.nbytes:
        raise Incompatible(
            f"the ranks declare {direct_bytes:,} bytes and {residual_bytes:,} are residual; the checkpoint has "
            f"{layout.nbytes:,}",
            hint="this is a fault of dcr: please report it with the log",
        )
    computed = {name for declaration in ranks for name in declaration.computed}
    hook = ranks[0].export == "hook"  # nobody knows what a hook computes
    owners = _spread(reasons, builders, layout)
    first = ranks[0]
    return Verdict(
        group=first.group, call=first.call, attempt=first.attempt, layout=layout.digest,
        nonces=tuple(declaration.nonce for declaration in ranks),
        maps=hashlib.sha256("".join(declaration.map for declaration in ranks).encode()).hexdigest(),
        export=first.export,
        residues={
            name: Residue(reasons[name], owners[name], hook or name in computed)
            for name in sorted(reasons, key=layout.index)
        },
        direct_bytes=direct_bytes, residual_bytes=residual_bytes, boxes=coverage.boxes, follows=follows,
    )  # fmt: skip


def _nbytes(names: Iterable[str], layout: Layout) -> int:
    return sum(layout[layout.index(name)].nbytes for name in names)


def _follows(
    faults: Sequence[Fault], reasons: Mapping[str, str], *, tied: Collection[tuple[str, str]], layout: Layout
) -> dict[str, str]:
    """Tensors of which no rank holds anything, each with the one that it is tied to, which ranks hold once."""
    faulty = {layout[fault.tensor].name: fault for fault in faults}
    absent = {name for name, fault in faulty.items() if fault.missing == fault.elements and not fault.outside}
    either_way = [way for pair in tied for way in (pair, pair[::-1])]
    return {name: source for name, source in either_way if name in absent and source not in {*faulty, *reasons}}


def _check_group(ranks: Sequence[Declaration], layout: Layout) -> None:
    """One declaration of every rank of the world; all of one group, call, attempt and layout; all export alike."""
    if not ranks:
        raise Incompatible("no rank has declared what it holds")
    world = Counter(declaration.world for declaration in ranks).most_common(1)[0][0]
    times = Counter(declaration.rank for declaration in ranks)
    wrong = []
    if absent := sorted(set(range(world)) - times.keys()):
        wrong.append(f"no word of {shorten_ranks(absent)} of {world}")
    if twice := sorted(rank for rank, n in times.items() if n > 1):
        wrong.append(f"two declarations of {shorten_ranks(twice)}")
    for what in ("world", "group", "call", "attempt"):
        wrong += _odd(ranks, what, f"another {what}")
    if wrong:
        raise Incompatible(
            f"the ranks do not declare as one group: {'; '.join(wrong)}",
            hint="construct Publisher alike on every rank, and call publish equally often",
        )
    if other := [d.rank for d in ranks if d.layout != layout.digest]:
        raise Incompatible(
            f"another layout than the stream's ({layout.digest[:12]}…) on {shorten_ranks(other)}",
            hint="give every rank the same stream and base checkpoint",
        )
    if wrong := _odd(ranks, "export", "another way to export"):
        raise Incompatible(
            f"the ranks cannot construct residual tensors together: {'; '.join(wrong)}",
            hint="give the same Trainer(export=...) on every rank: exports run as collectives",
        )
    for declaration in ranks:
        _check_columns(declaration, layout)


def _odd(ranks: Sequence[Declaration], what: str, words: str) -> list[str]:
    """The ranks that differ from the majority in one attribute, in words."""
    common = Counter(getattr(declaration, what) for declaration in ranks).most_common(1)[0][0]
    odd = [declaration.rank for declaration in ranks if getattr(declaration, what) != common]
    return [f"{words} on {shorten_ranks(odd)}"] if odd else []


def _check_columns(declaration: Declaration, layout: Layout) -> None:
    tensors = declaration.columns()[0]
    strange = sorted(name for name in declaration.residual if name not in layout)
    if strange or (tensors.size and int(tensors[-1]) >= len(layout)):
        raise Incompatible(
            f"rank {declaration.rank} declares tensors that the layout does not have: "
            f"{shorten(strange) or f'number {int(tensors[-1])} of {len(layout)}'}",
            hint="run the same version of dcr on every rank",
        )
    if 8 * len(declaration.buildable) < len(layout) or len(declaration.together) not in (0, 2 * len(layout)):
        raise Incompatible(f"rank {declaration.rank} does not say of every tensor whether it can export it")


def _reasons(ranks: Sequence[Declaration]) -> dict[str, str]:
    """All tensors that any rank calls residual, with the reason; with the ranks unless all ranks give the same
    reason."""
    said: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for declaration in ranks:
        for name, why in declaration.residual.items():
            said[name][why].append(declaration.rank)
    return {name: _joined(by_reason, len(ranks)) for name, by_reason in said.items()}


def _joined(by_reason: Mapping[str, list[int]], world: int) -> str:
    if len(by_reason) == 1:
        ((why, ranks),) = by_reason.items()
        return why if len(ranks) == world else f"{why} ({shorten_ranks(ranks)})"
    return "; ".join(f"{shorten_ranks(ranks)}: {why}" for why, ranks in by_reason.items())


def _check_faults(faults: Sequence[Fault], layout: Layout) -> None:
    """Raise for tensors that are not exactly once and that nobody can export."""
    if not faults:
        return
    shown = shorten((f"{layout[fault.tensor].name}: {fault}" for fault in faults), separator="; ")
    raise Incompatible(
        f"{len(faults):,} of {len(layout):,} tensors do not have exactly one source over all ranks: {shown}",
        hint=_advice(faults, [layout[fault.tensor].name for fault in faults]),
    )


def _advice(faults: Sequence[Fault], names: Sequence[str]) -> str:
    """What to do about it; the most frequent causes come first."""
    if all(map(is_head, names)) and all(fault.missing == fault.elements for fault in faults):
        return FOLLOWS
    if any(fault.double for fault in faults):
        return (
            "say which ranks hold alike what no mesh counts with replica=(number, count): plain tensors on several "
            "ranks, copies on pipeline stages; or give Trainer(export=...) that constructs them"
        )
    if any(fault.outside for fault in faults):
        return "the map does not belong to this checkpoint: check the model's configuration and shapes"
    return (
        "publish from every rank of every pipeline stage, with all layers that the base checkpoint has; count as "
        "replicas only ranks that publish, with replica=(number, count); or give Trainer(export=...) that builds them"
    )


class _Builders:
    """Which ranks can construct which canonical tensor.

    A collective never ends if one of its ranks does not join: a rank without all its partners is no builder.
    """

    def __init__(self, ranks: Sequence[Declaration], layout: Layout) -> None:
        self.world = len(ranks)
        self._ranks = ranks
        size = -(-len(layout) // 8)
        self._bits = np.stack([np.frombuffer(one.buildable, np.uint8)[:size] * bool(one.export) for one in ranks])

    def of(self, tensor: int) -> npt.NDArray[np.int64]:
        """Ranks that construct tensor number `tensor` of the layout."""
        can = np.flatnonzero(self._bits[:, tensor // 8] >> (tensor % 8) & 1)
        willing = set(can.tolist())
        joined = {mesh: willing.issuperset(mesh) for mesh in {self._ranks[n].partners(tensor) for n in willing}}
        return can[[joined[self._ranks[n].partners(tensor)] for n in can]]


def _check_buildable(reasons: Mapping[str, str], builders: _Builders, layout: Layout) -> None:
    lost = [name for name in sorted(reasons, key=layout.index) if not builders.of(layout.index(name)).size]
    if lost:
        shown = shorten((f"{name}: {reasons[name]}" for name in lost), separator="; ")
        raise Incompatible(
            f"{len(lost):,} tensors cannot be projected, and no rank can export them: {shown}",
            hint="give Trainer(export=...) that constructs them",
        )


def _spread(reasons: Mapping[str, str], builders: _Builders, layout: Layout) -> dict[str, int]:
    """An owner for each residual tensor: largest first, to the least loaded of the ranks that construct it."""
    loads = np.zeros(builders.world, np.int64)
    owners: dict[str, int] = {}
    for name in sorted(reasons, key=lambda name: (-layout[layout.index(name)].nbytes, name)):
        can = builders.of(layout.index(name))
        owners[name] = int(can[np.argmin(loads[can])])
        loads[owners[name]] += max(layout[layout.index(name)].nbytes, 1)
    return owners
