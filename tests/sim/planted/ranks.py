"""Bugs of process groups that publish together (musts P1 to P3, P7, L4, L5)."""

from __future__ import annotations

from typing import Any

from sim.planted.bug import Put, bug

from dcr_daemon.errors import KeyNotFound, UsageError
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Open
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.group import anchors, join, peers
from dcr_daemon.publish.group.collect import ObjectCollector
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.join import Joined
from dcr_daemon.publish.group.member import Member
from dcr_daemon.publish.version import attempt, uploads
from dcr_daemon.publish.version.attempt import Attempt


@bug("P1", "leftover_rank")
def a_rank_answers_any_group(put: Put) -> None:
    """A rank that was left over takes the opens of the next group for its own."""
    right = Member._take

    def take(self: Member, record: Any, *, earlier: bool = False) -> None:
        right(self, record, earlier=earlier)
        if isinstance(record, Open):
            self._newest_open, self._epoch, self._ousted, self._call = record, record.epoch, "", record.call

    put(Member, "_take", take)


@bug("P1", "twin_rank")
def ranks_have_no_nonce(put: Put) -> None:
    """Two processes that believe to be one rank share its names, and neither looks what lies there."""
    for what in ("chunk", "part", "sums"):
        right = getattr(names, what)

        def named(version: int, seq: int, group: str, rank: int, nonce: str, *n: int, right: Any = right) -> str:
            return str(right(version, seq, group, rank, "0", *n))

        put(names, what, named)

    async def put_if_absent(store: Any, key: str, body: Any, **_: Any) -> None:
        await store.create(key, body)

    put(uploads, "put_if_absent", put_if_absent)
    put(attempt, "put_if_absent", put_if_absent)


def _without_a_step(put: Put) -> None:
    right = Member.open

    async def open_(self: Member, **options: Any) -> Any:
        try:
            return await right(self, **options)
        except UsageError:
            return self._joined_open

    put(Member, "open", open_)


@bug("P2", "rank_disagrees")
def steps_are_not_compared(put: Put) -> None:
    """A rank adds to a version whatever step its trainer is in."""
    _without_a_step(put)


@bug("P2", "rank_disagrees")
def calls_are_not_counted(put: Put) -> None:
    """A rank answers whatever stands open with the weights that it has just now."""

    def mine(self: Member) -> Any:
        self._check_ours()
        opened = self._newest_open
        return opened if opened and opened.seq not in self._fates else None

    _without_a_step(put)
    put(Member, "_open_of_this_call", mine)


@bug("P2", "rank_disagrees")
def a_skipped_call_is_answered_later(put: Put) -> None:
    """What a rank has left out it makes good with its next weights."""
    right = Member._open_of_this_call

    def mine(self: Member) -> Any:
        opened = self._newest_open
        if opened and opened.call < self._call and opened.seq not in self._fates:
            return opened
        return right(self)

    async def refuse_missed(self: Member) -> None:
        return None

    _without_a_step(put)
    put(Member, "_open_of_this_call", mine)
    put(Member, "_refuse_missed", refuse_missed)


@bug("P3", "rank_is_damaged")
def sums_are_not_compared(put: Put) -> None:
    """Rank 0 seals what the ranks bring, whether or not they together held the version before."""
    put(Joined, "missed", lambda *_: [])


@bug("P3", "rank_is_damaged")
def a_rank_diffs_from_whatever_it_holds(put: Put) -> None:
    """A baseline of an older version is taken for the newest one, and rank 0 believes it."""
    right = RankContext.restore

    async def restore(self: RankContext) -> None:
        if self.baseline.version is None:
            await right(self)
        self.baseline.version = self.ledger.state.seal.version

    put(RankContext, "restore", restore)
    put(Joined, "missed", lambda *_: [])


@bug("P3", "rank_disagrees", "ranks_squatted")
def a_rank_commits_with_its_part(put: Put) -> None:
    """What a rank has uploaded counts for it as published, whatever becomes of the version."""

    async def undo(self: Attempt) -> bool:
        await self.cancel()
        self._spool.clear()
        version = self._baseline.version
        assert version is not None
        self._baseline.commit(version, self.segments)
        return True

    put(Attempt, "undo", undo)


@bug("P7", "ranks_squatted", "rank_lags")
def a_rank_undoes_before_the_abort(put: Put) -> None:
    """A rank in trouble takes its update back and goes on, though rank 0 may have all that it needs to seal it."""

    async def abort_unless_sealed(self: Member, cause: Any, **_: Any) -> None:
        await self._undo(None, cause)

    put(Member, "abort_unless_sealed", abort_unless_sealed)


@bug("P7", "rank_disagrees")
def what_a_rank_says_is_not_heard(put: Put) -> None:
    """Rank 0 waits for a rank that has given up, and says why."""

    async def failed(self: ObjectCollector, *_: Any) -> None:
        return None

    put(ObjectCollector, "_failed", failed)


@bug("P7", "rank_disagrees")
def only_the_newest_fate_is_kept(put: Put) -> None:
    """A rank that reads two fates at one go forgets the one that it waits for."""
    right = Member._take

    def take(self: Member, record: Any, *, earlier: bool = False) -> None:
        right(self, record, earlier=earlier)
        if fate := self._fates.get(getattr(record, "attempt", -1)):
            self._fates = {record.attempt: fate}
        elif hasattr(record, "attempt"):
            self._fates = {}

    put(Member, "_take", take)


@bug("L4", "ranks_and_anything")
def one_read_is_believed(put: Put) -> None:
    """What another rank has put is sealed as it was read once, though no digest vouches for it yet."""

    async def read_listed(store: Any, key: str, *, limit: int, **_: Any) -> Any:
        while True:
            try:
                return await store.get(key, limit=limit)
            except KeyNotFound:
                continue

    put(join, "read_listed", read_listed)
    put(anchors, "read_listed", read_listed)


@bug("L5 (elsewhere: a full copy was not whole)", "ranks", "rank_lags")
def anchor_without_a_share(put: Put) -> None:
    """Rank 0 records an anchor of what is there, and does not wait for the other ranks."""

    async def join_anchor(context: Any, seal: Any, *, keys: Any, **arguments: Any) -> Any:
        return await right(context, seal, keys=dict(list(keys.items())[:-1]), **arguments)

    right = anchors.join_anchor
    put(peers, "join_anchor", join_anchor)
    put(anchors, "check_vector", lambda *_, **__: None)


@bug("P3", "rank_is_damaged")
def a_share_is_believed(put: Put) -> None:
    """What a rank finds in its cache is the version that a small file beside it names, and nobody sums."""

    async def prove(self: Baseline, *candidates: Any) -> Any:
        if candidates:
            version, vector = candidates[0]
            self.version, self._vector, self._sums, self.unverified_base = (
                version,
                vector.copy(),
                await self._measure(),
                False,
            )
            return vector
        return await right(self, *candidates)

    right = Baseline.prove
    put(Baseline, "prove", prove)
