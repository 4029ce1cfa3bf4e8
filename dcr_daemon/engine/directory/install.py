"""A whole checkpoint: built beside the present one from an anchor's files, then put in its place by renames (must E8).

`DirectoryEngine.load` calls these on a thread; they work on a `DirectoryState`. This fills an empty directory, repairs
one that is damaged, and materialises a version for `dcr materialize`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.disk import disk_error
from dcr_daemon.engine.directory.assemble import build_checkpoint
from dcr_daemon.engine.directory.checkout import CONFIG, Marker, open_checkpoint
from dcr_daemon.engine.directory.journal import Install, write_journal
from dcr_daemon.engine.directory.state import DirectoryState
from dcr_daemon.engine.directory.transactions import good_journal


def build_fresh(state: DirectoryState, files: Sequence[Path], shard_bytes: int) -> None:
    """Write the tensors of `files` as the checkpoint `state.fresh`. Raises as `build_checkpoint`."""
    try:
        build_checkpoint(state.fresh, state.layout, files=files, shard_bytes=shard_bytes)
    except OSError as error:
        raise disk_error(error, state.fresh) from error


def install_fresh(state: DirectoryState, marker: Marker) -> None:
    """Put `state.fresh` in the place of the present checkpoint, and open it; `marker` says which version it is."""
    checkout = state.checkout
    serving, state.serving, state.version = state.serving, False, None
    if state.checkpoint is not None:
        state.checkpoint.close()
        state.checkpoint = None
    shutil.rmtree(checkout.incoming, ignore_errors=True)
    state.fresh.rename(checkout.incoming)
    runtime.failpoint("engine.dir.incoming")
    files = {path.name for path in checkout.incoming.iterdir()}
    present = {path.name for path in state.path.glob("*.safetensors*")}
    head = Install(
        txn=marker.txn,
        stream=marker.stream,
        layout=marker.layout,
        version=marker.version,
        label=marker.label,
        vector=marker.vector,
        files=sorted(files - {CONFIG}),
        stale=sorted(present - files),
    )
    write_journal(state.draft, head)
    checkout.begin(state.draft, marker.stream, marker.txn)
    with contextlib.closing(good_journal(checkout)) as journal:
        checkout.redo(journal, state.layout)
    checkout.sweep()
    state.checkpoint = open_checkpoint(state.path, state.layout)
    state.serving = serving
