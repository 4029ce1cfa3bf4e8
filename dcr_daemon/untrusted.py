"""Values out of bytes that anybody may have written: a value of the expected shape, or `ValueError`, nothing else.

msgspec judges shape, range and encoding, in memory bounded by the input. What it leaves to the host is judged here:
how deep a document may be nested is a number of the format, not of the reader's stack, so that all readers of the same
bytes come to the same verdict (must L2).
"""

from __future__ import annotations

import re
from typing import Protocol, TypeVar

import msgspec

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


def too_deep(body: bytes) -> bool:
    """Whether JSON in `body` is nested deeper than `MAX_NESTING`; of other bytes it says nothing sensible."""
    depth = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            return True
    return False
