"""The layout: which canonical tensors a stream has, in one order, under one digest (docs/FORMAT.md 1).

A layout is read from safetensors headers, never by loading weights. Two layouts belong to one
stream exactly if their digests are equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.dtypes import item_size
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.untrusted import decode_json
from dcr_daemon.wording import shorten

MAX_AXES = 64
MAX_ELEMENTS = (1 << 46) - 1  #: of one tensor


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """One canonical tensor as the Hugging Face checkpoint names, types and shapes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes per element."""
        return item_size(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements; a 0-dim tensor has one."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.width


def countable(shape: Sequence[int]) -> bool:
    """Whether a tensor may have this shape. Checked before anything is multiplied: a hostile shape can be so large
    that counting its elements never ends. The limits leave room for every unit number of a fingerprint (< 2^48)."""
    return len(shape) <= MAX_AXES and all(0 <= n <= MAX_ELEMENTS for n in shape) and math.prod(shape) <= MAX_ELEMENTS


_tables = msgspec.json.Decoder(list[tuple[str, str, tuple[int, ...]]])


class Layout:
    """Canonical tensors sorted by the UTF-8 bytes of their names.

    Raises:
        Incompatible: a name occurs twice, a dtype is not byte-sized, or a shape is negative or absurdly large.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(sorted(specs, key=lambda spec: spec.name.encode()))
        self._index = {spec.name: i for i, spec in enumerate(self.specs)}
        if len(self._index) != len(self.specs):
            names = [spec.name for spec in self.specs]
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise Incompatible(f"tensors named twice: {shorten(twice)}")
        for spec in self.specs:
            item_size(spec.dtype)
            if not countable(spec.shape):
                raise Incompatible(
                    f"tensor {spec.name} has a negative or impossible dimension: {reprlib.repr(spec.shape)}"
                )

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __getitem__(self, index: int) -> TensorSpec:
        return self.specs[index]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.digest)

    def index(self, name: str) -> int:
        """Place of a tensor in layout order; `KeyError` if there is none of that name."""
        return self._index[name]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a dense checkpoint of this layout, headers not counted."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(spec.elements for spec in self.specs)

    @cached_property
    def encoded(self) -> bytes:
        """The compact JSON `[[name, dtype, shape], …]` that the digest covers and the bucket stores."""
        table = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`, in hex."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Fingerprint key of each tensor: first 8 bytes of SHA-256(digest, 0x00, name), little-endian."""
        seed = bytes.fromhex(self.digest) + b"\0"
        keys = [hashlib.sha256(seed + spec.name.encode()).digest()[:8] for spec in self.specs]
        return np.frombuffer(b"".join(keys), dtype="<u8").copy()

    @classmethod
    def decode(cls, body: bytes) -> Layout:
        """Read `encoded` back. Raises `Corrupt` unless re-encoding gives the same bytes."""
        try:
            layout = cls(TensorSpec(*row) for row in decode_json(_tables, body))
        except ValueError as error:
            raise Corrupt(f"layout object does not parse: {error}") from error
        if layout.encoded != body:
            raise Corrupt("layout object is not in canonical form")
        return layout


def describe_difference(found: Layout, wanted: Layout) -> str:
    """In words, where a checkpoint's layout is not the one that is wanted; empty if it is."""
    have, want = {spec.name: spec for spec in found}, {spec.name: spec for spec in wanted}
    groups = {
        "missing": want.keys() - have.keys(),
        "added": have.keys() - want.keys(),
        "retyped or reshaped": {name for name in want.keys() & have.keys() if want[name] != have[name]},
    }
    return "; ".join(f"{kind}: {shorten(sorted(names))}" for kind, names in groups.items() if names)
