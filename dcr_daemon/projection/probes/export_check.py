"""A probe of exports that give live weights only: is what a rank reads of its tensors what the framework exports?

Such an export (a residual hook: Megatron-Bridge's, a loop over `full_tensor()`) takes no synthetic tensors, so it is
asked for some real canonical tensors. Every box of them that this rank is the source of is read and compared bit for
bit, which tests map, value function and reader together. This is a collective step; the tensors follow from the layout
alone. It proves less than self_check.py where weights are equal (a norm of ones), and more elsewhere: it tests the map
at full size, on the run's own values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import boxes
from dcr_daemon.projection.binding.residual import Exporter
from dcr_daemon.projection.probes.self_check import Probed, numberless
from dcr_daemon.projection.region_map import Map
from dcr_daemon.projection.values import Cast, apply

EXPORT_CAP = 256 << 20  #: bytes of a tensor that is asked for: the export makes it whole, on every rank
BUDGET = 1 << 30  #: bytes of all of them together

Read = Callable[[int, Box], Any]  #: layout index, box -> its bits as flat unsigned integers (`Reader.read`)


def asked(layout: Layout, *, cap: int = EXPORT_CAP, budget: int = BUDGET) -> tuple[str, ...]:
    """Tensors to ask an export for, in layout order: the first and last of every form, then others while they fit.

    A form is equal names but for numbers, equal dtype and shape. The same on every rank.
    """
    forms: dict[Any, list[str]] = defaultdict(list)
    for spec in layout:
        if 0 < spec.nbytes <= cap:
            forms[numberless(spec.name), spec.dtype, spec.shape].append(spec.name)
    ends = [name for names in forms.values() for name in dict.fromkeys((names[0], names[-1]))]
    rest = [name for names in forms.values() for name in names[1:-1]]
    chosen, spent = set(), 0
    for name in [*ends, *rest]:
        spent += layout[layout.index(name)].nbytes
        if spent > budget:
            break
        chosen.add(name)
    return tuple(spec.name for spec in layout if spec.name in chosen)


def probe_export(exporter: Exporter, read: Read, *, mapped: Map, layout: Layout, names: Sequence[str]) -> Probed:
    """Compare this rank's boxes of `names` with the export's tensors. Collective: alike on every rank.

    Raises:
        Incompatible: the export does not give what it is asked for.
    """
    started = runtime.monotonic()
    owned: dict[str, list[Box]] = defaultdict(list)
    chosen = set(names)
    for region in mapped.regions:
        if region.name in chosen:
            owned[region.name] += boxes(region)
    residual: dict[str, str] = {}
    checked = 0
    for name, whole in exporter.build(names, owned.keys() - mapped.residual.keys()):
        index = layout.index(name)
        canonical = apply(Cast(layout[index].dtype), whole).contiguous().cpu()
        wrong = sum(_differing(read(index, one), canonical, one) for one in owned[name])
        checked += 1
        if wrong:
            held = sum(one.elements for one in owned[name])
            residual[name] = f"{wrong:,} of {held:,} elements that this rank holds are not what the export gives"
    return Probed(residual, checked, len(names), runtime.monotonic() - started)


def _differing(bits: Any, canonical: Any, box: Box) -> int:
    """Elements of a box whose bits are not those of the exported tensor; all NaNs count as equal."""
    theirs = torch.as_strided(canonical.reshape(-1), box.shape, box.strides, box.dst).contiguous().reshape(-1)
    bits_there = theirs.view(torch.uint8).numpy().view(bits.dtype)
    places = np.flatnonzero(bits_there != bits)
    if places.size and theirs.dtype.is_floating_point:
        ours = torch.from_numpy(bits[places].view(np.uint8)).view(theirs.dtype)
        return int((~(ours.float().isnan() & theirs[torch.from_numpy(places)].float().isnan())).sum())
    return int(places.size)
