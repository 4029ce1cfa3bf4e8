"""`dcr verify`: checks that everything that the ledger names is there and consistent.

It reads every record, every object of every version at or above the floor, and every file of every anchor; recomputes
the chain of fingerprint vectors from the chunks, and the vector of each anchor from its tensors. It only reads, and may
run beside publishers, replicas and collectors. Each damage is reported with what can still be done about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Emit, discard
from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.checks import Check
from dcr_daemon.ledger.audit.repairs import Damage, Repairs
from dcr_daemon.ledger.audit.replay import replay
from dcr_daemon.ledger.doubt import REPAIR
from dcr_daemon.ledger.fold import Step
from dcr_daemon.ledger.holes import NAMED, find_holes
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Anchor, Seal, State, Stream
from dcr_daemon.ledger.retention.collector import Collector
from dcr_daemon.ledger.retention.plan import Plan, RetentionPolicy
from dcr_daemon.store.port import Store


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and what was found.

    `void` names records that do not count. Those of a stale epoch are harmless; others are among the damages.
    `orphans`: number of objects that nothing needs, which `dcr gc` deletes (None: unknown, because the ledger is
    damaged). `unknown`: keys that are not a stream's.
    """

    stream: str
    head: int
    floor: int
    records: int
    void: list[str]
    versions: int
    anchors: int
    objects: int
    bytes: int
    damages: list[Damage]
    orphans: int | None = None
    orphan_bytes: int | None = None
    unknown: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.damages


Progress = Callable[[str, int, int], None]
"""Called with what is being read, how many of how many."""


async def verify(
    store: Store,
    *,
    emit: Emit = discard,
    progress: Progress | None = None,
    workers: runtime.Workers | None = None,
) -> Report:
    """Check the whole stream in `store`.

    Raises:
        NotFound: there is no stream.
        Corrupt: its first record or its layout cannot be read: then nothing can be checked.
        Incompatible: it is of a newer format.
    """
    found = await _read_ledger(store)
    check = Check(
        store,
        found.stream,
        seals={seal.version: seal for seal in found.seals},
        floor=found.state.floor,
        emit=emit,
        workers=workers,
    )
    await check.open()
    seals = [seal for seal in found.seals if seal.version >= found.state.floor]
    newest = {anchor.version: anchor for anchor in found.anchors}  # an older one of a version may be collected
    anchors = [anchor for anchor in newest.values() if anchor.version >= found.state.floor]
    for n, seal in enumerate(seals):
        if progress:
            progress(f"version {seal.version}", n, len(seals) + len(anchors))
        await check.version(seal)
    for n, anchor in enumerate(anchors):
        if progress:
            progress(f"anchor of version {anchor.version}", len(seals) + n, len(seals) + len(anchors))
        await check.anchor(anchor)
    # Retention may have raised the floor meanwhile: what it may delete is not damage (must L5).
    floor = max(found.state.floor, (await _read_ledger(store)).state.floor) if check.damages else found.state.floor
    damages = [d for d in check.damages if d.version is None or d.version >= floor]
    repairs = Repairs(damages, anchors, floor=floor, head=found.state.seal.version)
    left = await _left_over(store)
    return Report(
        stream=found.stream.stream,
        head=found.state.seal.version,
        floor=floor,
        records=found.records,
        void=found.void,
        versions=len(seals),
        anchors=len(anchors),
        objects=check.objects,
        bytes=check.bytes,
        damages=[*found.damages, *map(repairs.advise, damages), *_unexplained(left)],
        orphans=len(left.items) if left else None,
        orphan_bytes=left.bytes if left else None,
        unknown=list(left.unknown) if left else [],
    )


async def _left_over(store: Store) -> Plan | None:
    """What retention would delete now; None if the ledger cannot be read on."""
    ledger = Ledger(store)
    try:
        await ledger.read()
        return await Collector(ledger).plan(RetentionPolicy())
    except Corrupt:
        return None


def _unexplained(left: Plan | None) -> Iterable[Damage]:
    """One damage for each folder of objects that the ledger does not know of."""
    for place in sorted({key.rpartition("/")[0] + "/" for key in left.unexplained}) if left else ():
        yield Damage(
            key=place,
            version=None,
            what="the ledger does not know of it, although a record came before its first object",
            repair="the ledger has lost its newest records, or two histories are in it: restore the records from a "
            "backup; if there is none, nothing leads to these objects any more: delete them, and retention goes on",
        )


class _Found:
    """The ledger, read from its first record."""

    def __init__(self, stream: Stream, state: State) -> None:
        self.stream = stream
        self.state = state
        self.records = 1
        self.void: list[str] = []
        self.seals: list[Seal] = []
        self.anchors: list[Anchor] = []
        self.damages: list[Damage] = []
        self._foreign = -1

    def note(self, step: Step) -> None:
        """One record. The first of a run that no honest writer can have written after what is before it is damage."""
        seq = step.tip.seq
        self.records, self.state = self.records + 1, step.tip.state
        if step.record is None:
            self.void.append(f"record {seq}: {step.void}")
        elif isinstance(step.record, Seal):
            self.seals.append(step.record)
        elif isinstance(step.record, Anchor):
            self.anchors.append(step.record)
        if not step.foreign:
            return
        if seq != self._foreign + 1:
            what = f"record {seq} is not what was written after record {seq - 1}: {step.void}"
            self.damages.append(Damage(key=names.record(seq), version=None, what=what, repair=_repair(step)))
        self._foreign = seq


def _repair(step: Step) -> str:
    """What can be done about a record that does not follow the one before it."""
    if step.record is not None:
        return f"it counts: record {step.tip.seq - 1} is not what it was; restore it from a backup"
    if not step.decided:
        return f"no reader goes past it: {REPAIR}"
    return "readers go past it; if it once counted, restore it from a backup"


async def _read_ledger(store: Store) -> _Found:
    found: _Found | None = None
    try:
        async for step in replay(store):
            if found is None:
                assert isinstance(step.record, Stream)
                found = _Found(step.record, step.tip.state)
                continue
            found.note(step)
    except Corrupt:
        if found is None:
            raise
        last = found.records - 1
        holes = await find_holes(store, last) or [last + 1]
        found.damages += [_missing(seq, more=len(holes) == NAMED and seq == holes[-1]) for seq in holes]
    assert found is not None
    return found


def _missing(seq: int, *, more: bool) -> Damage:
    what = f"record {seq} is missing although later ones exist; nothing above it was checked"
    return Damage(
        key=names.record(seq),
        version=None,
        what=what + ", and more may be missing" * more,
        repair="put the object back as it was: from a backup or another copy of the bucket, or, if the bucket keeps "
        "versions, by deleting its delete marker. Without a copy the stream ends here: create a new one from the "
        "newest checkpoint (docs/OPERATIONS.md, 'A damaged ledger')",
    )
