"""All that a rank asks before it declares itself, in one call; and which exporter constructs its residual tensors.

`examine` looks at what `live` made. Its first step is the rank's own; the others are collectives, and run only where
the ranks are known to call it together.
"""

from __future__ import annotations

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.projection.canary import CAP, Probed, probe
from dcr_daemon.projection.exports import Read, asked, probe_export
from dcr_daemon.projection.live import Live
from dcr_daemon.projection.meshes import probe_meshes
from dcr_daemon.projection.residual import Exporter, ExportHook, Gather, Hook


class Current:
    """The tensors of the step that is being published, for an exporter that outlives steps."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def exporter(self, layout: Layout, hook: ExportHook | None) -> Exporter:
        """The user's hook if there is one, else our own, over `live` as it is when tensors are constructed."""
        if hook is not None:
            return Hook(hook, layout)
        return Gather(lambda: self.live.handed, layout, self.live.conversion, self.live.convert)


def examine(live: Live, layout: Layout, exporter: Exporter, read: Read, *, together: bool, cap: int = CAP) -> Probed:
    """Probe a rank's map: against placements and export, and, where ranks meet, against torch and the user's hook.

    Args:
        read: bits of the boxes that the rank holds (`Reader.read`).
        together: every rank calls this at the same point, torch.distributed is initialised or there is but one rank.
        cap: bytes that may be allocated at a time; a hook's own tensors do not count.
    """
    found = probe(live.handed, live.map, layout, conversion=live.conversion, convert=live.convert, cap=cap)
    if together:
        if _distributed():
            found += probe_meshes(live.handed, live.map, layout, cap=cap)
        if exporter.kind == "hook":
            found += probe_export(exporter, read, live.map, layout, asked(layout))
    return found


def _distributed() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
