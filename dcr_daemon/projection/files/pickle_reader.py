"""A pickle read as data: nothing in it is executed, no import, no call, no method.

torch's distributed checkpoints keep their table of pieces in a pickle, and a pickle is a program. Its instructions are
followed here with symbols in place of objects: whatever the program would construct becomes an `Opaque` that records
what would be called and with what. `piece_map` and `storage` take values of the expected form and refuse all others.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Opaque:
    """An object that the pickle would make by calling `made_by` with `arguments`, then fill with `state` and `items`.

    A bare reference to something importable has no arguments: `made_by` is its dotted name.
    """

    made_by: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Dotted name of the class or function; empty if what was to be called is itself computed."""
        made_by = self.made_by.made_by if isinstance(self.made_by, Opaque) else self.made_by
        return made_by if isinstance(made_by, str) else ""


PERSISTENT = "<persistent>"  #: made by whoever unpickles, from an id: a storage, in torch's archives

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FRESH: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
_PUTS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}


def read_pickle(body: bytes) -> Any:
    """The value of a pickle, with `Opaque` in place of everything that is no plain data.

    Raises:
        ValueError: it is no pickle, is cut short, or uses instructions that plain tables do not need.
    """
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(body):
            if code.name == "STOP":
                return machine.pop()
            machine.step(code.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"a pickle that contradicts itself: {error}") from error
    raise ValueError("a pickle without an end")


class _Machine:
    """The stack, its marks and the memo of a pickle being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self.stack.pop()

    def above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def step(self, name: str, argument: Any) -> None:
        """Follow one instruction."""
        if name in ("PROTO", "FRAME"):
            return
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _PUTS:
            self.memo[len(self.memo) if name == "MEMOIZE" else int(argument)] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[int(argument)])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name.startswith("TUPLE"):
            self._tuple(name)
        elif name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS"):
            self._fill(name)
        else:
            self._construct(name, argument)

    def _tuple(self, name: str) -> None:
        size = int(name.removeprefix("TUPLE") or -1)
        if size < 0:
            self.stack.append(tuple(self.above_mark()))
        else:
            parts = [self.pop() for _ in range(size)]
            self.stack.append(tuple(reversed(parts)))

    def _fill(self, name: str) -> None:
        values = self.above_mark() if name.endswith("S") else [self.pop()]
        if name == "SETITEM":
            values = [self.pop(), *values]
        target = self.stack[-1]
        if name.startswith("SETITEM"):
            table = target.items if isinstance(target, Opaque) else target
            table.update(zip(map(_key, values[::2]), values[1::2], strict=True))
        elif isinstance(target, set):
            target.update(map(_key, values))
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise ValueError(f"a pickle adds to {type(target).__name__}")

    def _construct(self, name: str, argument: Any) -> None:
        if name == "GLOBAL":
            self.stack.append(Opaque(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            last, first = self.pop(), self.pop()
            self.stack.append(Opaque(f"{first}.{last}"))
        elif name == "BINPERSID":
            self.stack.append(Opaque(PERSISTENT, (self.pop(),)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, made_by = self.pop(), self.pop()
            if not isinstance(arguments, tuple):  # nothing is copied: a few bytes could ask for it again and again
                raise ValueError(f"a pickle that calls something with a {type(arguments).__name__}")
            self.stack.append(Opaque(made_by, arguments))
        elif name == "BUILD":
            state = self.pop()
            self.stack[-1].state = state
        else:
            raise ValueError(f"a pickle with the instruction {name}, which no table of tensors needs")


def _key(value: Any) -> Any:
    """A key of a table. Tuples in tuples are refused: hashing a very deep one overruns the stack of the interpreter."""
    if isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
        raise ValueError("a pickle with nested keys, which no table of tensors needs")
    return value
