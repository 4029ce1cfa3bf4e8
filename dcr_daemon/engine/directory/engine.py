"""The engine port over a checkpoint directory, which is kept current in place.

For serving stacks that load from disk, for evaluation jobs, for `dcr materialize`. A kill at any instant is repaired
by the next `attach` (must E8); while weights are between versions `config.json` is out of the way, so that every
loader fails. Every tensor is `exact`. A directory that is neither empty nor at a version of the stream is refused; a
plain checkpoint that turns out to be one is adopted by `prove`.

    attach, prove     here; `checkout` repairs what a kill interrupted, `state` holds what is known of the directory
    prepare, swap     `transactions`: staged hops become a journal (`compose`, `journal`), and then changed values
    load              `install`: a whole checkpoint is built from files (`assemble`) and takes the old one's place
    scrub             `scrub`

Owners are told apart by a token in the directory; an `attach` by another engine fences the earlier owner for good: all
its calls, `attach` included, raise `Fenced` (must E3).
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.disk import disk_error, disk_full, out_of_handles
from dcr_daemon.engine.directory.checkout import Marker, open_checkpoint
from dcr_daemon.engine.directory.install import build_fresh, install_fresh
from dcr_daemon.engine.directory.scrub import scrub
from dcr_daemon.engine.directory.state import DirectoryState, vector_digest
from dcr_daemon.engine.directory.transactions import apply_changes, compile_ahead, draft_changes, hops_within
from dcr_daemon.engine.port import (
    Attached,
    EngineStatus,
    Prepared,
    Scrubbed,
    StreamFacts,
    Swapped,
    TensorClass,
    Transaction,
    Verdict,
)
from dcr_daemon.engine.staged import read_layout, read_vector
from dcr_daemon.errors import DcrError, EngineRefused, ResourceExhausted
from dcr_daemon.events import Emit, discard

BUDGET = 2 << 30  #: encoded bytes of the hops in one transaction; one hop is always taken
SHARD_BYTES = 4 << 30


class DirectoryEngine:
    """The engine port over a directory; what is said there of each call is not repeated here.

    Args:
        path: the directory; it may be absent. Its file system must have `flock`, `rename` and shared maps.
        budget: bytes of chunks composed into one transaction at most.
        shard_bytes: size of the files that `load` writes.
        emit: takes the progress of a long copy of linked files.
    """

    def __init__(
        self, path: Path | str, *, budget: int = BUDGET, shard_bytes: int = SHARD_BYTES, emit: Emit = discard
    ) -> None:
        self.path = Path(path)
        self._state = DirectoryState(self.path, emit)
        self._budget, self._shard_bytes = budget, shard_bytes

    async def attach(self, facts: StreamFacts) -> Attached:
        state = self._state
        state.calls += 1
        async with state.turn:
            state.forget()
            try:
                with state.fenced_first():
                    state.layout = await state.run(self._read_layout, facts)
                    self.path.mkdir(parents=True, exist_ok=True)
                    async with state.locked():
                        marker = await state.run(self._repair_and_claim, facts)
                    state.facts = facts
                    state.vector = np.zeros(len(state.layout), np.uint64)
                    if state.checkpoint is not None:
                        state.stamp = state.stamp_now()
                        state.vector = await state.sum(state.checkpoint)
                state.check_owner()  # else the next owner may have written while the sums were taken
            except OSError as error:
                if out_of_handles(error) or disk_full(error):
                    raise disk_error(error, self.path) from error
                raise EngineRefused(
                    f"{self.path} cannot be used: {error.strerror or error}", hint="check its path and permissions"
                ) from error
            # A marker alone proves nothing: the live sums must be those of its version.
            if state.checkpoint is not None and marker is not None and marker.vector == vector_digest(state.vector):
                state.version = marker.version
                state.end(marker.txn)
            return Attached(
                token=state.token,
                incarnation=state.nonce,
                adopted=None,
                version=state.version,
                serving=False,
                vector=state.vector.astype("<u8").tobytes(),
                classes=[TensorClass.EXACT] * len(state.layout),
                unverified=state.unverified,
            )

    def _read_layout(self, facts: StreamFacts) -> Layout:
        layout = read_layout(facts.layout, facts.layout_digest)
        compile_ahead(layout)
        return layout

    def _repair_and_claim(self, facts: StreamFacts) -> Marker | None:
        """Finish what a kill interrupted, open the checkpoint, become the owner; a directory that does not fit is left
        untouched. The marker, unless the directory is still between versions."""
        state, checkout = self._state, self._state.checkout
        state.check_not_overtaken()
        checkout.check_links()
        marks = [mark for mark in (checkout.marker(), checkout.dirty()) if mark is not None]
        for mark in marks:
            if mark.stream != facts.stream:
                raise EngineRefused(
                    f"{self.path} follows stream {mark.stream}, not {facts.stream}",
                    hint="give each stream a directory of its own",
                )
        unrepaired = checkout.recover(state.layout, state.emit)
        state.unverified = not marks and not checkout.empty
        if not checkout.empty and not unrepaired:
            try:
                state.checkpoint = open_checkpoint(self.path, state.layout)
            except ResourceExhausted:
                raise  # that says nothing about what is in it
            except DcrError as error:
                if state.unverified:
                    raise EngineRefused(
                        f"{self.path} is neither empty nor a checkpoint of this stream: {error.message}",
                        hint="name an empty directory, or one that holds a version of the stream",
                    ) from error
        state.token = checkout.claim(state.nonce)
        return None if unrepaired else checkout.marker()

    async def prove(self, version: int, vector: str, label: str, loaded: str = "") -> None:
        state = self._state
        async with state.owned():
            wanted = await state.run(read_vector, vector, state.layout)
            _ = state.open
            state.check_stamp()
            if not np.array_equal(wanted, state.vector):
                names = state.names_differing(wanted, state.vector)
                raise EngineRefused(f"{self.path} is not version {version}: {names} differ")
            if state.version != version or state.unverified:
                await state.run(state.checkout.finish, state.marker(version, label, state.vector))
            state.version, state.unverified = version, False

    async def serve(self) -> None:
        state = self._state
        async with state.owned():
            if state.version is None or state.checkout.dirty() is not None:
                raise EngineRefused(f"{self.path} is not proved at a version", hint="prove or load one first")
            state.serving = True

    async def prepare(self, txn: Transaction) -> Prepared:
        state = self._state
        async with state.owned(locked=False):
            if state.version is None or state.version != txn.base:
                raise EngineRefused(f"{self.path} is at version {state.version}, the change begins at {txn.base}")
            async with state.locked():  # what the change needs of the disk is had before it begins
                state.check_owner()
                state.check_stamp()
                await state.run(state.own_files)
            state.discard()
            hops = hops_within(txn.hops, self._budget)
            changed = await state.run(draft_changes, state, txn, hops)
            state.check_owner()
            return Prepared(txn=txn.id, changed=changed, fits=len(hops))

    async def swap(self, txn: str) -> Swapped:
        state = self._state
        async with state.owned():
            if txn in state.ended:
                return state.ended[txn]
            if state.prepared is None or state.prepared.txn != txn:
                raise EngineRefused(f"{self.path} has no prepared transaction {txn}", hint="prepare it again")
            state.check_stamp()
            began, head = runtime.monotonic(), state.prepared
            state.prepared = None
            tries, reason = await state.run(apply_changes, state, head)
            state.stamp = state.stamp_now()
            return state.end(txn, tries=tries, reason=reason, pause=runtime.monotonic() - began)

    async def outcome(self, txn: str) -> Swapped:
        state = self._state
        if txn in state.ended:
            return state.ended[txn]
        reason = "never begun here, or ended in an earlier run"
        return Swapped(txn=txn, verdict=Verdict.UNKNOWN, version=state.version, serving=state.serving, reason=reason)

    async def finish_adopted(self, txn: str) -> Swapped:
        """As the port says. `attach` finishes whatever was begun, so nothing is ever left to finish."""
        state = self._state
        async with state.owned():
            if txn not in state.ended:
                raise EngineRefused(f"{self.path} has not begun transaction {txn}", hint="ask for its outcome")
            return state.ended[txn]

    async def drop(self) -> None:
        async with self._state.owned():
            self._state.discard()

    async def load(self, version: int, files: list[str], vector: str, label: str) -> Swapped:
        """As the port says; side files (config, tokenizer) that lie beside the first of `files` are installed too.

        The new checkpoint is written whole and proved before anything of the old one is touched.
        """
        state = self._state
        async with state.owned(locked=False):
            if state.unverified:
                raise EngineRefused(
                    f"{self.path} is neither empty nor at a version of this stream, and would be overwritten",
                    hint="name an empty directory, or empty this one",
                )
            state.discard()
            wanted = await state.run(read_vector, vector, state.layout)
            await state.run(build_fresh, state, [Path(file) for file in files], self._shard_bytes)
            with Checkpoint(state.fresh) as built:
                found = await state.sum(built)
            if not np.array_equal(found, wanted):
                await state.run(shutil.rmtree, state.fresh)
                names = state.names_differing(found, wanted)
                raise EngineRefused(f"the files given for version {version} are not that version: {names} differ")
            began, txn = runtime.monotonic(), f"load-{runtime.nonce()}"
            async with state.locked():
                state.check_owner()
                await state.run(install_fresh, state, state.marker(version, label, found, txn))
            state.version, state.vector, state.stamp = version, found, state.stamp_now()
            return state.end(txn, pause=runtime.monotonic() - began)

    async def scrub(self, rate: float, first: int = 0) -> Scrubbed:
        with self._state.fenced_first():
            return await scrub(self._state, rate=rate, first=first)

    async def status(self) -> EngineStatus:
        """As the port says; a directory that somebody else has changed is at no known version."""
        state = self._state
        if not state.turn.locked() and state.version is not None:
            with contextlib.suppress(EngineRefused):
                state.check_stamp()
        if state.facts is not None:
            state.check_owner()  # last: what differs may be what the next owner has written
        prepared = state.prepared.txn if state.prepared else None
        return EngineStatus(incarnation=state.nonce, version=state.version, serving=state.serving, prepared=prepared)

    async def close(self) -> None:
        state = self._state
        state.calls += 1
        async with state.turn:
            if state.facts is not None:
                state.clean_up()
            state.forget()
            state.workers.close()
