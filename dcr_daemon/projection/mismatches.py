"""What a trainer hands over and the stream's layout has no place for, collected so that one error lists it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Incompatible
from dcr_daemon.wording import shorten

SAVED = (
    "give what it would save, in transformers `core_model_loading.revert_weight_conversion(model, model.state_dict())`"
)
MISMATCHES = 100  #: names of one kind in an error


class LayoutMismatches:
    """Names that do not fit, by kind: "added", "missing", "retyped", "reshaped", …

    Args:
        what: the update in words.
        ignore: globs of names outside the layout that are no misfits.
        instead: what to do if the model holds together what its checkpoint has one by one.
    """

    def __init__(self, what: str, layout: Layout, ignore: Sequence[str] = (), *, instead: str = SAVED) -> None:
        self._what, self._layout, self._ignore, self._instead = what, layout, ignore, instead
        self._kinds: dict[str, list[str]] = {}

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self._ignore)

    def note(self, kind: str, name: str) -> None:
        self._kinds.setdefault(kind, []).append(name)

    def __contains__(self, kind: str) -> bool:
        return kind in self._kinds

    def check(self) -> None:
        """Raise `Incompatible` if anything was noted."""
        if self._kinds:
            raise self._error()

    def _error(self) -> Incompatible:
        texts = [f"{kind}: {shorten(sorted(names), limit=MISMATCHES)}" for kind, names in sorted(self._kinds.items())]
        hint = "nothing of it is published; correct it, or start a new stream from a base that has this layout"
        added = self._kinds.get("added", [])
        if why := _adapted(added) or _prefixed(added, self._layout) or _fused(added, self._layout, self._instead):
            hint = f"{why}; nothing of it is published"
        elif added and "missing" in self._kinds:
            hint = f"were tensors renamed? {hint}"
        elif added:
            hint = f"--ignore GLOB, ignore= of a Publisher, drops names that no server needs; {hint}"
        return Incompatible(f"{self._what} does not fit the stream's layout: {'; '.join(texts)}", hint=hint)


def _adapted(added: list[str]) -> str:
    """What to do if there are low-rank adapters beside the weights that they change, as PEFT calls both."""
    if not any(".lora_" in name for name in added):
        return ""
    return (
        "adapters are published merged: after PEFT's `merge_adapter()` give the tensors that have no `lora_` in their "
        "names, called without `base_layer.`"
    )


def _prefixed(added: list[str], layout: Layout) -> str:
    """What to do if most of these names are the layout's behind one prefix, as a wrapper of the model leaves them."""
    cuts = ((name[: dot + 1], name[dot + 1 :]) for name in added for dot in _dots(name))
    counts = Counter(prefix for prefix, rest in cuts if rest in layout)
    prefix, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if 2 * count <= len(added):
        return ""
    return f"the names begin with {prefix!r}, those of the base do not: give the model inside the wrapper"


def _fused(added: list[str], layout: Layout, instead: str) -> str:
    """What to do if one of these tensors stands for numbered ones of the layout: transformers 5 trains experts so."""
    parents = {name.rpartition(".")[0] + ".0." for name in added if "." in name}
    if not any(spec.name.startswith(tuple(parents)) for spec in layout):
        return ""
    return f"the model holds tensors together that its checkpoint has one by one: {instead}"


def _dots(name: str) -> Iterable[int]:
    return (i for i, c in enumerate(name) if c == ".")
