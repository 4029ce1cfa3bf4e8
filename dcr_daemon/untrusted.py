"""Values out of bytes that anybody may have written: a value of the expected shape, or `ValueError`, nothing else.

msgspec judges shape, range and encoding, in memory bounded by the input. What it leaves to the host is judged here:
how deep a document may be nested is a number of the format, not of the reader's stack, so that all readers of the same
bytes come to the same verdict (must L2).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Never, Protocol, TypeVar

import msgspec
import zstandard

T_co = TypeVar("T_co", covariant=True)

MAX_NESTING = 64  #: arrays and objects inside one another, in any JSON document that DCR reads

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # unclosed ones too: whatever the bytes, in linear time
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Decoder(Protocol[T_co]):
    """A msgspec decoder, of JSON or msgpack."""

    def decode(self, body: bytes, /) -> T_co: ...


def decode_json(decoder: Decoder[T_co], body: bytes) -> T_co:
    """The JSON document in `body`. Raises `ValueError` for anything that `decoder` does not take, or nested too deep.

    Of a key that occurs twice in one object the last value counts.
    """
    if too_deep(body):
        raise ValueError(f"it is nested deeper than {MAX_NESTING}")
    return decode(decoder, body)


def decode(decoder: Decoder[T_co], body: bytes) -> T_co:
    """What `decoder` makes of `body`. Raises `ValueError` for anything that it does not take."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def load_json(body: bytes) -> Any:
    """JSON that others write by the same standard, as plain objects: UTF-8, every key once, no NaN and no infinity.

    Raises `ValueError` for anything else, or what is nested too deep.
    """
    if too_deep(body):
        raise ValueError(f"it is nested deeper than {MAX_NESTING}")
    return json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:200]!r} occurs twice")
    return table


def _no_number(text: str) -> Never:
    raise ValueError(f"{text} is no JSON")


def too_deep(body: bytes) -> bool:
    """Whether JSON in `body` is nested deeper than `MAX_NESTING`; of other bytes it says nothing sensible."""
    depth = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            return True
    return False


def decompress_bounded(body: bytes, what: str, packed_limit: int, unpacked_limit: int) -> bytes:
    """Decompress one zstd frame; both sizes, in bytes, are checked before anything is allocated.

    Raises:
        ValueError: larger than a limit, or no single complete frame of the size that it declares.
    """
    if len(body) > packed_limit:
        raise ValueError(f"{what} of {len(body)} bytes; the limit is {packed_limit}")
    try:
        frame = zstandard.get_frame_parameters(body)
        if not 0 <= frame.content_size <= unpacked_limit or frame.window_size > unpacked_limit:
            raise ValueError(f"{what} would unpack to more than {unpacked_limit} bytes, or does not say to how many")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=unpacked_limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{what} does not decompress: {error}") from error
