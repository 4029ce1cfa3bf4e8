"""A rank's declaration, before its group publishes: which canonical elements it is the source of.

Ranks communicate through the bucket only, so this is all that the gate (gate.py) knows of them. Boxes are columns, not
objects: a rank of a trillion-parameter model owns a hundred thousand, nearly all of a few forms, and rank 0 reads a
thousand such declarations. Bytes in a bucket are untrusted: `decode_declaration` gives a declaration that is consistent
in itself, or raises `ValueError`; whether it fits the layout and the other ranks is checked by the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from dcr_daemon.canonical.layout import MAX_ELEMENTS, Layout
from dcr_daemon.canonical.region import MAX_AXES, merge
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.region_map import Map
from dcr_daemon.untrusted import decode, decompress_bounded
from dcr_daemon.wording import shorten

MAX_BOXES = 1 << 22  #: of one rank
MAX_WORLD = 4096  #: ranks of one group: a seal names one part of each, and a record of the ledger has a limit
MAX_MESHES = (1 << 16) - 1
PACKED_LIMIT = 32 << 20  #: bytes of an encoded declaration
UNPACKED_LIMIT = 128 << 20  #: bytes that it may unpack to: boxes of 16 bytes each, and names with reasons
DROPPED_LIMIT = 100  #: names that are declared; they are for the log
REASON_LIMIT = 400  #: characters of a reason

_Word = Annotated[str, msgspec.Meta(max_length=200)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
_Extent = Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]
_Form = Annotated[tuple[tuple[_Extent, _Extent], ...], msgspec.Meta(max_length=MAX_AXES)]

Form = tuple[tuple[int, int], ...]  #: of a box, its axes as (extent, stride) by falling stride; none for one element
Export = Literal["", "hook", "own"]  #: how a rank can construct whole canonical tensors: not, by a hook, by gathering
Columns = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.int64]]


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    nonce: of the process; a restarted rank declares another.
    layout, map: digests of the layout and of the rank's map.
    export: how this rank takes part in constructing residual tensors.
    forms: the distinct forms of its boxes.
    tensors, kinds, starts: one entry per box, by rising tensor: layout index (u32), number of its form (u32), first
        canonical element (u64); little-endian.
    buildable: bit i (little-endian) says that the rank's export can construct tensor i of the layout.
    meshes: the distinct sets of ranks that a collective of this rank's export needs.
    together: one u16 per tensor of the layout, little-endian: which of `meshes` its construction needs, counted from 1;
        0 for no other rank. Empty: none needs any.
    residual: canonical tensors that the rank could not map, or whose probe failed, with the reason.
    computed: those of them whose elements are computed from several: they travel as overwrites.
    dropped: the first names that the source has and the layout has not (a tied head, for example).
    """

    group: _Word
    call: _Count
    attempt: _Count
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
    nonce: _Word
    layout: _Digest
    map: _Digest
    export: Export
    forms: Annotated[tuple[_Form, ...], msgspec.Meta(max_length=MAX_BOXES)]
    tensors: bytes
    kinds: bytes
    starts: bytes
    buildable: bytes
    meshes: Annotated[
        tuple[Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)], ...], msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(max_length=MAX_MESHES),
    ] = ()
    together: bytes = b""
    residual: dict[_Name, Annotated[str, msgspec.Meta(max_length=REASON_LIMIT)]]
    computed: tuple[_Name, ...]
    dropped: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=DROPPED_LIMIT)]

    @property
    def boxes(self) -> int:
        return len(self.tensors) // 4

    def partners(self, tensor: int) -> tuple[int, ...]:
        """The ranks without which this one cannot construct tensor number `tensor` of the layout."""
        number = int.from_bytes(self.together[2 * tensor : 2 * tensor + 2], "little")
        return self.meshes[number - 1] if number else ()

    def columns(self) -> Columns:
        """Layout index, number of the form and first element of every box, without a copy."""
        return (
            np.frombuffer(self.tensors, "<u4"),
            np.frombuffer(self.kinds, "<u4"),
            np.frombuffer(self.starts, "<i8"),
        )


def declare(
    made: Map,
    layout: Layout,
    *,
    group: str,
    call: int,
    attempt: int,
    rank: int,
    world: int,
    nonce: str,
    export: Export = "",
    buildable: Callable[[str], bool] | None = None,
    partners: Callable[[str], Collection[int]] | None = None,
    probed: dict[str, str] | None = None,
    computed: Collection[str] = (),
    dropped: Iterable[str] = (),
) -> Declaration:
    """The declaration of a rank whose map is `made`.

    Args:
        buildable: whether the export constructs a canonical tensor; None for one that constructs them all.
        partners: ranks that have to take part for this rank to construct a canonical tensor, this one among them; None
            where none has to.
        probed: residual names of the rank's own probe (`probes.self_check`), beside those of the map.
        computed: names whose export computes; those that are not residual are left out.

    Raises:
        Incompatible: more than `MAX_BOXES` boxes, or a residual name that the layout does not have.
    """
    residual = {name: why[:REASON_LIMIT] for name, why in {**made.residual, **(probed or {})}.items()}
    if unexpected := sorted(name for name in residual if name not in layout):
        raise Incompatible(f"residual tensors that the layout does not have: {shorten(unexpected)}")
    forms, columns = _boxes(made, layout, residual)
    meshes, together = _meshes(layout, partners) if export and partners else ((), b"")
    can = np.array([bool(export) and (buildable is None or buildable(spec.name)) for spec in layout], np.bool_)
    return Declaration(
        group=group, call=call, attempt=attempt, rank=rank, world=world, nonce=nonce, layout=layout.digest,
        map=made.digest, export=export, forms=forms, tensors=columns[0].tobytes(), kinds=columns[1].tobytes(),
        starts=columns[2].tobytes(), buildable=np.packbits(can, bitorder="little").tobytes(), meshes=meshes,
        together=together, residual=residual, computed=tuple(sorted(set(computed) & residual.keys())),
        dropped=tuple(sorted(dropped))[:DROPPED_LIMIT],
    )  # fmt: skip


def _meshes(layout: Layout, partners: Callable[[str], Collection[int]]) -> tuple[tuple[tuple[int, ...], ...], bytes]:
    """The distinct sets of partners, and the number of each tensor's."""
    known: dict[tuple[int, ...], int] = {(): 0}
    numbers = [known.setdefault(tuple(sorted(partners(spec.name))), len(known)) for spec in layout]
    if len(known) > MAX_MESHES:
        raise Incompatible(f"the export of this rank needs {len(known):,} different groups of ranks")
    return tuple(known)[1:], np.array(numbers, "<u2").tobytes()


def _boxes(made: Map, layout: Layout, residual: Collection[str]) -> tuple[tuple[Form, ...], Columns]:
    """The canonical sides of a map's regions; those of residual tensors are nobody's."""
    forms: dict[Form, int] = {}
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    rows: list[tuple[int, int, int]] = []
    for region in made.regions:
        if region.name in residual or region.name not in layout:
            continue
        sides = region.shape, region.dst_strides
        if sides not in known:
            axes = merge((n, stride, stride) for n, stride in zip(*sides, strict=True))
            known[sides] = forms.setdefault(tuple((n, stride) for n, stride, _ in axes), len(forms))
        rows.append((layout.index(region.name), known[sides], region.dst))
    if len(rows) > MAX_BOXES:
        raise Incompatible(
            f"this rank is the source of {len(rows):,} boxes; {MAX_BOXES:,} are the most that a rank may declare",
            hint="such a layout is better published through the residual export",
        )
    tensors, kinds, starts = np.array(sorted(rows, key=lambda row: (row[0], row[2])), np.int64).reshape(-1, 3).T
    return tuple(forms), (tensors.astype("<u4"), kinds.astype("<u4"), starts.astype("<i8"))


def encode_declaration(declaration: Declaration) -> bytes:
    """Msgpack, compressed with zstd: about one byte per box where forms repeat."""
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(declaration))


_declarations = msgspec.msgpack.Decoder(Declaration)


def decode_declaration(body: bytes) -> Declaration:
    """Read `encode_declaration` back. Raises `ValueError` for anything that is no sound declaration.

    Sound: columns of one length, boxes that visit no element twice, tensors in rising order, a rank inside its world.
    """
    declaration = decode(
        _declarations,
        decompress_bounded(body, "a declaration", packed_limit=PACKED_LIMIT, unpacked_limit=UNPACKED_LIMIT),
    )
    if declaration.rank >= declaration.world:
        raise ValueError(f"rank {declaration.rank} of a world of {declaration.world}")
    if not 8 * declaration.boxes == 2 * len(declaration.kinds) == len(declaration.starts) <= 8 * MAX_BOXES:
        raise ValueError("its columns are not equally long")
    for form in declaration.forms:
        _check_form(form)
    tensors, kinds, starts = declaration.columns()
    if tensors.size and not (
        int(kinds.max()) < len(declaration.forms)
        and bool((tensors[1:] >= tensors[:-1]).all())
        and 0 <= int(starts.min()) <= int(starts.max()) <= MAX_ELEMENTS
    ):
        raise ValueError("its boxes are out of order or of no form")
    together = np.frombuffer(declaration.together, "<u2") if len(declaration.together) % 2 == 0 else None
    if together is None or (together.size and int(together.max()) > len(declaration.meshes)):
        raise ValueError("its export needs ranks that it does not name")
    if not declaration.residual.keys() >= set(declaration.computed):
        raise ValueError("it calls tensors computed that are not residual")
    return declaration


def _check_form(form: Form) -> None:
    """Axes by falling stride, each stepping over all that the finer ones span: no element twice."""
    span = 0
    for n, stride in reversed(form):
        if n < 2 or stride <= span:
            raise ValueError(f"no form of a box: {form}")
        span += (n - 1) * stride
        if span > MAX_ELEMENTS:
            raise ValueError("a form that is larger than any tensor")
