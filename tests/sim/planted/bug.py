"""What a planted bug is, and how it is put into production code for the time of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    """`must`: the rule that it breaks. `scenarios`: where it shows, the likeliest first. `plant` puts it in force."""

    name: str
    must: str
    what: str
    scenarios: tuple[str, ...]
    plant: Callable[[Put], None]


BUGS: dict[str, Bug] = {}


def bug(must: str, *scenarios: str) -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
    """Register a planter; its name is the bug's, its docstring says what is wrong."""

    def register(plant: Callable[[Put], None]) -> Callable[[Put], None]:
        name = plant.__name__
        BUGS[name] = Bug(name, must, " ".join((plant.__doc__ or "").split()), scenarios, plant)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[Bug]:
    """`BUGS[name]` is in force inside; afterwards everything is as it was."""
    with ExitStack() as stack:

        def put(owner: Any, attribute: str, wrong: Any) -> None:
            right = vars(owner)[attribute]
            setattr(owner, attribute, wrong)
            stack.callback(setattr, owner, attribute, right)

        BUGS[name].plant(put)
        yield BUGS[name]
