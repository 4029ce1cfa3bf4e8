"""Decodes bytes from outside (the bucket, the engine's socket): a value of the expected type, or `ValueError`.

msgspec checks types, ranges and encoding, in memory bounded by the input. This module adds a limit on nesting: it is a
constant of the format, independent of the reader's stack, so that all readers of the same bytes decide alike (must L2).
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

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also unclosed ones; linear time for any bytes
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Decoder(Protocol[T_co]):
    """A msgspec decoder, of JSON or msgpack."""

    def decode(self, body: bytes, /) -> T_co: ...


def decode_json(decoder: Decoder[T_co], body: bytes) -> T_co:
    """The JSON document in `body`. Raises `ValueError` if `decoder` rejects it or it is nested too deep.

    If a key occurs twice in an object, the last value is used.
    """
    if too_deep(body):
        raise ValueError(f"it is nested deeper than {MAX_NESTING}")
    return decode(decoder, body)


def decode(decoder: Decoder[T_co], body: bytes) -> T_co:
    """`body`, decoded. Raises `ValueError` if `decoder` rejects it."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def load_json(body: bytes) -> Any:
    """JSON written by other programs, as plain objects. It must be UTF-8, with unique keys, without NaN and infinity.

    Raises `ValueError` for anything else, and for a document that is nested too deep.
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
    raise ValueError(f"{text} is not JSON")


def too_deep(body: bytes) -> bool:
    """Whether the JSON in `body` is nested deeper than `MAX_NESTING`. The answer means nothing for other bytes."""
    depth = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            return True
    return False


def decompress_bounded(body: bytes, what: str, *, packed_limit: int, unpacked_limit: int) -> bytes:
    """Decompress one zstd frame; both sizes, in bytes, are checked before anything is allocated.

    Raises:
        ValueError: it is larger than a limit, or not one complete frame of the size that it declares.
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
