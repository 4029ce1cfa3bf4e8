"""Whole canonical tensors out of an anchor's safetensors files, mapped and not copied (docs/FORMAT.md 3).

The subscriber has verified the files; here they are read again from scratch, because a worker that writes what a
header misdescribes would write outside a tensor. A tensor is stored whole under its name, or as entries `name#n`
whose boxes the file's metadata gives; those are joined in host memory, one tensor at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt
from dcr_daemon.untrusted import decode_json, load_json
from dcr_daemon.vllm_plugin.weights.memory import Bits

Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]
_places = msgspec.json.Decoder(Place)

HEADER_LIMIT = 100 << 20  #: bytes, as in the safetensors library


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry: `box` is None for a whole tensor."""

    file: npt.NDArray[np.uint8]
    start: int
    stop: int
    box: Box | None


class DenseFiles:
    """What a set of files holds of a layout.

    Raises:
        Corrupt: a header does not parse, or an entry disagrees with the layout or with its file.
        OSError: a file cannot be mapped.
    """

    def __init__(self, paths: Sequence[str], layout: Layout) -> None:
        self._layout = layout
        self._stored: dict[int, list[Stored]] = {}
        for path in paths:
            try:
                self._read(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise _corrupt(path, f"header does not parse: {error}") from error

    def _read(self, path: str) -> None:
        if Path(path).stat().st_size < 8:
            raise _corrupt(path, "it is not a safetensors file")
        file = np.memmap(path, dtype=np.uint8, mode="r")
        size = int(file[:8].view("<u8")[0])
        if size > min(HEADER_LIMIT, file.size - 8):
            raise _corrupt(path, "it is truncated, or not a safetensors file")
        header = load_json(file[8 : 8 + size].tobytes())
        texts = header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            # A tensor may be called like a piece, or like something else in the metadata: its own name comes first.
            place = texts.get(name) if name not in self._layout else None
            self._add(
                path, file, 8 + size, name, entry, None if place is None else decode_json(_places, place.encode())
            )

    def _add(
        self,
        path: str,
        file: npt.NDArray[np.uint8],
        data: int,
        name: str,
        entry: dict[str, object],
        place: Place | None,
    ) -> None:
        box: Box | None = None
        if place is not None:
            name, dst, shape, strides = place
            box = Box(dst, shape, strides)
        if name not in self._layout:
            return  # a checkpoint may hold an alias that the layout leaves out (a tied head)
        index = self._layout.index(name)
        spec = self._layout[index]
        begin, end = (operator.index(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
        elements = spec.elements if box is None else box.elements
        whole = box is not None or tuple(entry["shape"]) == spec.shape  # type: ignore[arg-type]
        if entry["dtype"] != spec.dtype or not whole or (box is not None and not box.fits(spec.elements)):
            raise _corrupt(path, f"{name} is not the tensor of that name in the layout")
        if begin < 0 or end - begin != elements * spec.width or data + end > file.size:
            raise _corrupt(path, f"{name} is truncated")
        self._stored.setdefault(index, []).append(Stored(file, data + begin, data + end, box))

    def missing(self, tensors: Sequence[int]) -> list[str]:
        """Names of those of `tensors` that the files do not hold in full."""
        return [self._layout[t].name for t in tensors if self._held(t) != self._layout[t].elements]

    def _held(self, tensor: int) -> int:
        width = self._layout[tensor].width
        return sum((stored.stop - stored.start) // width for stored in self._stored.get(tensor, ()))

    def lanes(self, tensor: int) -> Bits:
        """All of a tensor as flat lanes: mapped where it is stored whole, else joined."""
        spec, stored = self._layout[tensor], self._stored.get(tensor, [])
        lane = bits_dtype(spec.width)
        if len(stored) == 1 and stored[0].box is None:
            return _lanes(stored[0], lane)
        joined = np.empty(spec.elements, dtype=lane)
        for part in stored:
            assert part.box is not None
            part.box.view(joined)[...] = _lanes(part, lane).reshape(part.box.shape)
        return joined


def _lanes(stored: Stored, lane: str) -> Bits:
    """A view; a tensor that starts at an odd byte of its file is copied to an aligned one."""
    raw = stored.file[stored.start : stored.stop]
    if raw.ctypes.data % np.dtype(lane).itemsize:
        raw = raw.copy()
    return raw.view(lane)


def _corrupt(path: str, what: str) -> Corrupt:
    return Corrupt(f"anchor file {path}: {what}", hint="fetch the anchor again")
