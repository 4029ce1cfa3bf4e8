"""Bugs of the watcher (must P8)."""

from __future__ import annotations

from typing import Any

from sim.planted.bug import Put, bug

from dcr_daemon.publish.watch import scanner
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.published import _Reading
from dcr_daemon.publish.watch.rewrites import Rewrites
from dcr_daemon.publish.watch.selection import CheckpointSelection
from dcr_daemon.publish.watch.write_state import Writers, WriteState


@bug("P8 (elsewhere: new shard 1 with old shard 2 was served)", "rewritten_directory")
def a_complete_directory_is_one_checkpoint(put: Put) -> None:
    """A directory that holds every tensor counts as complete, whatever it held before."""

    def update(self: Rewrites, relative: str, present: Any, *, complete: Any, timed: bool) -> None:
        return None

    put(Rewrites, "update", update)


@bug("P8", "rewritten_directory")
def what_was_rewritten_unseen_is_one_checkpoint(put: Put) -> None:
    """When every file was replaced, nobody asks whether that was in one go."""
    put(scanner, "_has_newer_index", lambda directory, mtime_ns: True)


@bug("P8 (elsewhere: a preallocated file was read with its empty middle)", "rewritten_directory")
def a_file_of_full_size_is_complete(put: Put) -> None:
    """Nobody asks the kernel who writes to a file."""

    def writers(self: WriteState, path: Any) -> Writers:
        return Writers.NONE

    put(WriteState, "writers", writers)


@bug("P8 (elsewhere: after a restart of numbering nothing was published any more)", "order_of_checkpoints")
def order_by_number(put: Put) -> None:
    """The checkpoint with the greatest number in its path counts as the newest."""

    def order(self: CheckpointCandidate) -> tuple[int, int, str]:
        return (-1 if self.step is None else self.step, self.written_ns, self.relative)

    put(CheckpointCandidate, "order", property(order))


@bug("P8", "order_of_checkpoints")
def whatever_appears_is_new(put: Put) -> None:
    """A checkpoint that appears is published, however old it is."""

    def is_new(self: CheckpointSelection, candidate: CheckpointCandidate) -> bool:
        return True

    put(CheckpointSelection, "_is_new", is_new)


@bug("P8", "order_of_checkpoints")
def cold_walk_reads_no_seal(put: Put) -> None:
    """The walk back over the seals, bounded for a publisher without its cache, ends before the first one: checkpoints
    that are versions count as new."""

    def take(self: _Reading, seal: Any) -> bool:
        return False

    put(_Reading, "take", take)
