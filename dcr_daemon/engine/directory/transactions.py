"""A change of some elements: drafted as a journal while the files are in use, then written in place (musts E4, E5, E8).

`DirectoryEngine.prepare` and `swap` call these on a thread; they work on a `DirectoryState`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.warm import compile_kernels
from dcr_daemon.disk import disk_error, disk_full
from dcr_daemon.engine.deltas import check_chain
from dcr_daemon.engine.directory.checkout import Checkout
from dcr_daemon.engine.directory.compose import compose, open_hop
from dcr_daemon.engine.directory.journal import Journal, Patch, read_journal, write_journal
from dcr_daemon.engine.directory.state import DirectoryState, vector_digest
from dcr_daemon.engine.port import Transaction, VersionDelta
from dcr_daemon.errors import Corrupt, DcrError

TRIES = 2  #: writes before a rollback


def compile_ahead(layout: Layout) -> None:
    """Compile every kernel that a transaction calls, so that none is compiled while no loader may open the directory.

    Once per process: a second call costs nothing."""
    from dcr_daemon.checkpoint import kernels as of_files
    from dcr_daemon.engine import kernels

    widths = {spec.width for spec in layout}
    compile_kernels(widths)
    of_files.warm(widths)
    kernels.match(*np.zeros((3, 1), dtype=np.int64))


def hops_within(hops: list[VersionDelta], budget: int) -> list[VersionDelta]:
    """The first hops whose chunk files have at most `budget` bytes together, but at least one hop (must E6)."""
    taken, size = list[VersionDelta](), 0
    for hop in hops:
        size += sum(Path(chunk).stat().st_size for chunk in hop.chunks)
        if taken and size > budget:
            break
        taken.append(hop)
    return taken


def draft_changes(state: DirectoryState, txn: Transaction, hops: list[VersionDelta]) -> int:
    """Compose the hops into a journal that waits under another name; returns how many elements it changes."""
    layout, facts = state.layout, state.stream
    opened = [open_hop(layout, facts.stream, hop=hop) for hop in hops]
    check_chain(layout, [hop.summary for hop in opened], state.vector)
    after = opened[-1].summary.after
    head = Patch(
        txn=txn.id,
        stream=facts.stream,
        layout=facts.layout_digest,
        base=txn.base,
        version=hops[-1].version,
        label=txn.label,
        vector=vector_digest(after),
    )
    changed = write_journal(state.draft, head, entries=compose(layout, opened, live=state.open.bits))
    runtime.failpoint("engine.dir.prepared")
    state.prepared, state.after = head, after
    return changed


def apply_changes(state: DirectoryState, head: Patch) -> tuple[int, str]:
    """Write the drafted changes, `TRIES` times at most, else the old values (must E5).

    Returns:
        How often it was tried, and why it failed, if it did.

    Raises:
        ResourceExhausted: the disk is full; the old values are back.
        Corrupt, OSError: it could not begin, or the old values could not be written either; then the mark stays.
    """
    checkout, errors = state.checkout, list[Exception]()
    state.own_files()  # as `prepare` did; somebody may have made a link since
    checkout.begin(state.draft, head.stream, head.txn)
    with contextlib.closing(good_journal(checkout)) as journal:
        for tries in range(1, TRIES + 1):
            try:
                checkout.redo(journal, state.layout)
            except (OSError, DcrError) as error:
                errors.append(error)
                continue
            state.version, state.vector = head.version, state.after
            return tries, ""
        # Until the old values are back and the mark is gone, the directory is at no version.
        serving, version = state.serving, state.version
        state.serving, state.version = False, None
        checkout.write(journal, state.layout, back=True)
        checkout.clear()
        state.serving, state.version = serving, version
        state.stamp = state.stamp_now()
    full = next((error for error in errors if isinstance(error, OSError) and disk_full(error)), None)
    if full is not None:
        raise disk_error(full, state.path) from full
    return TRIES, "; ".join(map(str, errors))


def good_journal(checkout: Checkout) -> Journal:
    """The journal that was just written. Raises `Corrupt` if it does not read back."""
    journal = read_journal(checkout.journal)
    if journal is None:
        raise Corrupt(f"{checkout.journal} does not read back as it was written", hint="check this disk")
    return journal
