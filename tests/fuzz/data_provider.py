"""Choices read from a fuzzer's bytes: numbers, defects of bytes, defects of JSON documents.

For targets that damage a valid input behind its checksums (`…_inside`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

EDGES = (0, 1, 2, 3, 7, 127, 128, 254, 255, 256, 65535, 65536)
DEEP = "DEEP"  #: stands for arrays inside one another, deeper than any parser goes

#: values that a field may not have, or may have only by accident
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63),
    -(2**63) - 1, 10**40, 0.5, 1e308, float("nan"), float("inf"), "", "0", "a", ".", "..", "../x", "a/../../b", "/x",
    "a//b", "a\0b", ".hidden", "-rf", "ledger/0000000000000000.json", "\ud800", "\u202e", "\n", "a" * 33,
    "f" * 64, "0" * 64, "x" * 600, [], {}, [[]], [None], {"": None}, [0, 0, 0, 0, 0], DEEP,
)  # fmt: skip


class DataProvider:
    """Reads choices from `data`, as libFuzzer's `FuzzedDataProvider` does. Bytes past the end are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def take(self, count: int) -> bytes:
        """The next bytes, fewer at the end."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def rest(self) -> bytes:
        return self.take(self.left)

    def below(self, limit: int) -> int:
        """From 0 to `limit - 1`."""
        width = max(1, ((limit - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(width), "little") % limit

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def number(self, near: int, limit: int) -> int:
        """An integer in [0, limit] that is worth trying where `near` stands."""
        wild = (*EDGES, near + 1, near - 1, near * 2, limit, limit - 1, limit // 2, limit // 2 + 1)
        kind = self.below(256)
        value = wild[kind % len(wild)] if kind < 224 else int.from_bytes(self.take(8), "little")
        return max(0, min(value, limit))

    def mangled(self, body: bytes) -> bytes:
        """`body` with one to three defects."""
        out = bytearray(body)
        for _ in range(1 + self.below(3)):
            at = self.below(len(out) + 1)
            match self.below(6):
                case 0:
                    out[at : at + 1] = bytes([self.below(256)])
                case 1:
                    out[at:at] = self.take(self.below(9))
                case 2:
                    del out[at : at + 1 + self.below(8)]
                case 3:
                    del out[at:]
                case 4:
                    out[at:at] = out[at : at + self.below(64)]
                case 5:
                    if at < len(out):
                        out[at] ^= 1 << self.below(8)
        return bytes(out)

    def document(self, value: Any) -> bytes:
        """JSON of `value` with one to three fields changed, dropped, doubled or moved, and sometimes broken bytes."""
        value = json.loads(json.dumps(value))
        for _ in range(1 + self.below(3)):
            self._change(value)
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=bool(self.below(2)))
        text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000)
        body = text.encode("utf-8", "surrogatepass")
        match self.below(16):
            case 0:
                return self.mangled(body)
            case 1 if body.startswith(b"{") and len(body) > 2:  # every key twice
                return body[:-1] + b"," + body[1:]
            case 2:
                return body.replace(b"a", b"\xc1\xa1", 1)  # overlong UTF-8
            case 3:
                return text.encode(self.pick(("utf-16", "utf-16-le", "utf-32")), "surrogatepass")
            case 4:
                return b"\xef\xbb\xbf" + body
        return body

    def _change(self, value: Any) -> None:
        """Walk to some place and spoil what is there, in place."""
        while isinstance(value, dict | list) and value:
            key = self.pick(list(value) if isinstance(value, dict) else range(len(value)))
            if isinstance(value[key], dict | list) and value[key] and self.below(4):
                value = value[key]
                continue
            inner = copy.deepcopy(value[key])
            match self.below(6):
                case 0:
                    del value[key]
                case 1 if isinstance(value, list):
                    value.append(inner)
                case 2:
                    value[key] = [inner]
                case 3:
                    other = self.pick(list(value) if isinstance(value, dict) else range(len(value)))
                    value[key] = copy.deepcopy(value[other])
                case 4 if isinstance(value, dict):
                    value[self.pick(("unknown", "kind", "format", "stream", "state"))] = copy.deepcopy(
                        self.pick(HOSTILE)
                    )
                case _:
                    value[key] = copy.deepcopy(self.pick(HOSTILE))
            return
