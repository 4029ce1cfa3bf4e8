"""The layout: which canonical tensors a stream has, in one order, under one digest (docs/FORMAT.md 1).

A layout is read from safetensors headers, never by loading weights. Two layouts are the same stream's
exactly if their digests are equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.dtypes import item_size
from dcr_daemon.errors import Corrupt, Incompatible


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


class Layout:
    """Canonical tensors sorted by the UTF-8 bytes of their names.

    Raises:
        Incompatible: a name occurs twice, a dtype is not byte-sized, or a shape is negative.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(sorted(specs, key=lambda spec: spec.name.encode()))
        self._index = {spec.name: i for i, spec in enumerate(self.specs)}
        if len(self._index) != len(self.specs):
            names = [spec.name for spec in self.specs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise Incompatible(f"tensors named twice: {', '.join(twice)}")
        for spec in self.specs:
            item_size(spec.dtype)
            if any(n < 0 for n in spec.shape):
                raise Incompatible(f"tensor {spec.name} has a negative dimension: {spec.shape}")

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
            layout = cls(TensorSpec(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in json.loads(body))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise Corrupt(f"layout object does not parse: {error}") from error
        if layout.encoded != body:
            raise Corrupt("layout object is not in canonical form")
        return layout
