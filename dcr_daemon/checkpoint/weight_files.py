"""Which files of a checkpoint directory hold its weights, where several sets of files lie side by side.

The rule is that of the transformers library (`modeling_utils._get_resolved_checkpoint_files`): `model.safetensors`
first, then the files that the index names. Without either, all files together. What is not read may be older, or belong
to another model, so whoever reads a directory names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files to read.

    Attributes:
        names: sorted; a file that the index names may not be there.
        by_index: whether the index says which they are, and which tensors they hold.
        passed_by: safetensors files that are not read, and the index if it is not, sorted.
    """

    names: list[str]
    by_index: bool
    passed_by: list[str]


def choose_weight_files(
    present: Collection[str], index: Mapping[str, str] | None = None, *, index_name: str = "", single: bool = True
) -> WeightFiles:
    """Choose among safetensors files that lie in one directory.

    Args:
        present: their names.
        index: file name by tensor, of the file `index_name`; None if there is no index.
        single: `SINGLE` holds a whole checkpoint, if it is there.
    """
    named = set((index or {}).values())
    if single and SINGLE in present and (SINGLE not in named or named == {SINGLE}):
        others = set(present) - {SINGLE}
        by_index = SINGLE in named
        return WeightFiles([SINGLE], by_index, sorted(others if by_index or index is None else {*others, index_name}))
    if index is None:
        return WeightFiles(sorted(present), False, [])
    return WeightFiles(sorted(named), True, sorted(set(present) - named))
