"""What a planted bug is, and how it is put into production code for the time of one run.

A patch that nobody calls is no bug. So `planted` refuses a patch of a name that production code does not look up (see
`lookups`), a patch that takes other arguments than what it replaces, and a patch of a function that another module has
imported by name, unless it is patched there too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from sim.planted.lookups import attributes_used, importers, sources

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
    """`BUGS[name]` is in force inside; afterwards everything is as it was.

    Raises:
        AssertionError: a patch has no effect, or not everywhere.
    """
    with ExitStack() as stack:
        patched = set[tuple[str, str]]()

        def put(owner: Any, attribute: str, wrong: Any) -> None:
            assert attribute in vars(owner), f"{owner.__name__} has no {attribute}"
            right = vars(owner)[attribute]
            _check_looked_up(owner, attribute)
            _check_arguments(owner, attribute, right, wrong)
            setattr(owner, attribute, wrong)
            stack.callback(setattr, owner, attribute, right)
            patched.add((owner.__name__, attribute))

        BUGS[name].plant(put)
        for place in patched:
            left = set(importers(*place)) - patched
            assert not left, f"{place} is imported by name, and not patched, in {left}"
        yield BUGS[name]


def _check_looked_up(owner: Any, attribute: str) -> None:
    if isinstance(owner, ModuleType):
        used = attribute in sources()[owner.__name__].names or (owner.__name__, attribute) in attributes_used()
    else:
        used = ("", attribute) in attributes_used()
    assert used, f"no function of production code looks up {owner.__name__}.{attribute}: a patch of it has no effect"


def _check_arguments(owner: Any, attribute: str, right: Any, wrong: Any) -> None:
    if not isinstance(right, FunctionType):
        return
    parameters = inspect.signature(right).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(wrong).bind(*positional, **keywords)
    except TypeError as error:
        raise AssertionError(f"the patch of {owner.__name__}.{attribute} takes other arguments: {error}") from error
