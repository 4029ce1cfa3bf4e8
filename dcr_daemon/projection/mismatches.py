"""Whether tensors that a trainer gives fit the stream's layout: the one place that decides and words it.

Whole tensors, files, pieces and shards of a rank each have code that looks at them and notes here what does not fit.
Everything is collected, so that one error lists all of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.tied import FOLLOWS, UNTIE, is_head
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.values import castable
from dcr_daemon.wording import shorten

SAVED = (
    "give what it would save, in transformers `core_model_loading.revert_weight_conversion(model, model.state_dict())`"
)
TIED = "tied by config.json and different"  #: kind of mismatch: two tensors of which a server has one
MISMATCHES = 100  #: names of one kind in an error
#: Heads of models that are trained beside a policy. To drop them would make such a model the policy.
_VALUE_HEAD = re.compile(
    r"(^|[._])(score|classifier|value_head|v_head|q_head|critic|reward|rm_head)s?([._]|$)", re.IGNORECASE
)


class LayoutMismatches:
    """Names that do not fit a layout, by kind: "added", "missing", "retyped", "reshaped", …

    Args:
        ignore: globs of names outside the layout to drop.
        instead: advice if the model fuses tensors that its checkpoint has one by one.
    """

    def __init__(self, layout: Layout, ignore: Sequence[str] = (), *, instead: str = SAVED) -> None:
        self._layout, self._ignore, self._instead = layout, ignore, instead
        self._kinds: dict[str, list[str]] = {}

    def ignores(self, name: str) -> bool:
        """Whether a name outside the layout is to be dropped."""
        return any(fnmatchcase(name, glob) for glob in self._ignore)

    def note(self, kind: str, name: str) -> None:
        """Collect a mismatch; `name` may say more than the name."""
        self._kinds.setdefault(kind, []).append(name)

    def judge_shape(self, name: str, shape: Sequence[int], *, expected: Sequence[int], by: str = "") -> bool:
        """Whether a whole tensor has the shape expected; notes it as reshaped if not.

        Args:
            by: what says that it has `shape`, if not the tensor itself.
        """
        if tuple(shape) == tuple(expected):
            return True
        source = f" by {by}" if by else ""
        self.note("reshaped", f"{name} (is {list(shape)}{source}, should be {list(expected)})")
        return False

    def judge_dtype(self, name: str, dtype: str, *, targets: Iterable[str]) -> bool:
        """Whether values of `dtype` may stand for these tensors of the layout; notes it as retyped if not."""
        expected = {self._layout[self._layout.index(target)].dtype for target in targets}
        if wrong := sorted(canonical for canonical in expected if not castable(dtype, canonical)):
            self.note("retyped", f"{name} (is {dtype}, should be {' and '.join(wrong)})")
        return not wrong

    def __contains__(self, kind: object) -> bool:
        return kind in self._kinds

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def check(self, subject: str, cause: Incompatible | None = None) -> None:
        """Raise `Incompatible` if anything was noted.

        Args:
            subject: what was judged, in words: "step 7", "checkpoint-40".
            cause: why names could not be understood otherwise, if somebody knows; its hint is given.
        """
        if not self:
            return
        texts = [f"{kind}: {shorten(sorted(names), limit=MISMATCHES)}" for kind, names in sorted(self._kinds.items())]
        if cause:
            texts.append(cause.message)
        message = f"{subject} does not fit the stream's layout: {'; '.join(texts)}"
        raise Incompatible(message, hint=cause.hint if cause else self._hint()) from cause

    def _hint(self) -> str:
        added = self._kinds.get("added", [])
        if hint := self._hint_about_heads(added, self._kinds.get("missing", [])):
            return f"{hint}; nothing of it is published"
        if why := _adapted(added) or _prefixed(added, self._layout) or _fused(added, self._layout, self._instead):
            return f"{why}; nothing of it is published"
        hint = "nothing of it is published; correct the weights, or start a new stream from a base with this layout"
        if added and "missing" in self:
            return f"were tensors renamed? {hint}"
        if any(_VALUE_HEAD.search(name) for name in added):
            return (
                "these are names of a value or reward model's head: --select GLOB says which checkpoints below the "
                "watched directory are the policy; nothing of it is published"
            )
        if added:
            return f"--ignore GLOB, ignore= of a Publisher, drops names that no server needs; {hint}"
        return hint

    def _hint_about_heads(self, added: list[str], missing: list[str]) -> str:
        """Advice if nothing but an output head is too much in an update of a model without one, or is missing."""
        if TIED in self:
            return UNTIE
        if not all(map(is_head, [*added, *missing])):
            return ""
        if added and not any(is_head(spec.name) for spec in self._layout):
            return f"the base has no output head, so its model ties it to the embedding, and this one differs: {UNTIE}"
        return FOLLOWS if missing and not added else ""


def _adapted(added: list[str]) -> str:
    """Advice if there are low-rank adapters, with PEFT's names, beside the weights that they change."""
    if not any(".lora_" in name for name in added):
        return ""
    return (
        "adapters are published merged: after PEFT's `merge_adapter()` give the tensors that have no `lora_` in their "
        "names, called without `base_layer.`"
    )


def _prefixed(added: list[str], layout: Layout) -> str:
    """Advice if most of these names are the layout's behind one prefix, as a wrapper of the model leaves them."""
    cuts = ((name[: dot + 1], name[dot + 1 :]) for name in added for dot in _dots(name))
    counts = Counter(prefix for prefix, rest in cuts if rest in layout)
    prefix, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if 2 * count <= len(added):
        return ""
    return f"the names begin with {prefix!r}, those of the base do not: give the model inside the wrapper"


def _fused(added: list[str], layout: Layout, instead: str) -> str:
    """Advice if one of these tensors stands for numbered ones of the layout, as transformers 5 fuses experts."""
    parents = {name.rpartition(".")[0] + ".0." for name in added if "." in name}
    if not any(spec.name.startswith(tuple(parents)) for spec in layout):
        return ""
    return f"the model fuses tensors that its checkpoint has one by one: {instead}"


def _dots(name: str) -> Iterable[int]:
    return (i for i, c in enumerate(name) if c == ".")
