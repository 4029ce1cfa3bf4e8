"""What must always hold, looked at after every request, every engine step and every word that an actor says.

The truth is what the trainers gave, what lies in the bucket, and what the engines hold in memory. Records are judged
by the real fold and chunks by the real decoder: nothing of that kind is defined here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sim.clock import Process
from sim.engines import SimEngine, expected_states
from sim.trainer import Lanes, same, vector_of
from support.vllm.toy_model import LAYOUT

from dcr_daemon.checkpoint.directory import DIRTY, Checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.engine.directory.checkout import CONFIG, Checkout
from dcr_daemon.errors import DcrError, Fenced
from dcr_daemon.events import Aborted, Committed, Event, Serving
from dcr_daemon.ledger import records
from dcr_daemon.ledger.fold import Tip, begin, fold
from dcr_daemon.ledger.records import Anchor, AnyRecord, ObjectRef, Seal
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.leader import Leader

if TYPE_CHECKING:
    from sim.actors import Actor, Replica, SimPublisher
    from sim.world import World


class Watch:
    """Follows one world."""

    def __init__(self, world: World, base: Lanes) -> None:
        self.world = world
        self.tip: Tip | None = None
        self.records: dict[int, AnyRecord] = {}
        self.versions: list[Lanes] = [base]
        self.seals: dict[int, Seal] = {}
        self.attempts: dict[int, Lanes] = {}
        self.anchors: dict[int, tuple[set[str], Lanes]] = {}  # the newest of each version: its keys, its weights
        self.checkpoints: dict[str, list[Lanes]] = {}  # by name: every state that its trainer wrote
        self.replicas: list[Replica] = []
        self.served: dict[str, int] = {}
        self.serving: dict[str, int] = {}  # by process
        self.engines: list[SimEngine] = []
        self.heads: dict[str, int] = {}
        self.void_allowed = False
        self.given_up: set[int] = set()  # attempts
        self.twins: set[str] = set()  # roles of ranks that two processes may believe to be
        self.groups: dict[str, int] = {}  # of many ranks: how many, by group id
        self._states: dict[int, list[dict[str, bytes]]] = {}
        self._running: dict[SimEngine, bool] = {}
        self._were_ready: set[str] = set()  # engine processes that have served
        world.bucket.created = self._created
        world.bucket.deleted = self._deleted
        world.looked_at = self.engine
        world.at_kill.append(self._died)

    @property
    def head(self) -> int:
        return self.tip.state.seal.version if self.tip else 0

    # -- what actors say ------------------------------------------------------------------------------------------

    def gave(self, attempt: int, lanes: Lanes) -> None:
        """A trainer gave these weights to this attempt."""
        self.attempts[attempt] = lanes

    def wrote(self, name: str, lanes: Lanes) -> None:
        """A trainer wrote this checkpoint."""
        self.checkpoints.setdefault(name, []).append(lanes)

    def opened(self, actor: SimPublisher, process: Process, session: Leader) -> None:
        self.idle(actor, process, session)

    def idle(self, actor: SimPublisher, process: Process, session: Leader) -> None:
        """A publisher has nothing under way: its baseline is the last version it knows."""
        head = session.head
        bits = [session.read(n, 0, spec.elements) for n, spec in enumerate(LAYOUT)]
        if not same(bits, self.versions[head]):
            self.world.fail("baseline", f"{process} holds other weights than version {head}")

    def holds(self, process: Process, session: Coordinator, *, newest: bool) -> None:
        """A rank has nothing under way: what it keeps is its share of a version; of the newest that it has read, unless
        others may publish without it."""
        context = session.context
        answered = getattr(session, "_joined_open", None)  # a member's, from its open on
        if context.attempt or not context.holds or session.ledger.undecided or answered:
            return
        baseline = context.baseline
        if baseline.version is None or baseline.unverified_base:
            return
        if baseline.version > session.head or (newest and baseline.version != session.head):
            self.world.fail("baseline", f"{process} holds version {baseline.version}; it has read {session.head}")
            return
        whole = self.versions[baseline.version]
        for number, block in enumerate(baseline.blocks):
            where = block.box.canonical(np.arange(block.box.elements, dtype=np.int64))
            if not np.array_equal(baseline[number], whole[block.tensor][where]):
                self.world.fail("baseline", f"{process} does not hold its share of version {baseline.version}")
                return

    def exited(self, actor: Actor, process: Process, error: BaseException | None) -> None:
        """Nobody is fenced by its own write."""
        session: Leader | None = getattr(actor, "session", None)
        newest = self.tip.state.epoch if self.tip else None
        if isinstance(error, Fenced) and session and newest and session.ledger.epoch == newest.seq:
            self.world.fail("fenced by itself", f"{process}: {error}")

    def _undone(self, attempt: int, process: Process) -> None:
        if any(seal.attempt == attempt for seal in self.seals.values()):
            self.world.fail("told", f"{process} gives attempt {attempt} up, which was sealed")

    def subscribing(self, replica: Replica, process: Process) -> None:
        self.heads[process.name] = self.head

    def told(self, actor: Actor, process: Process, event: Event) -> None:
        self.world.note(f"{type(event).__name__}", process)
        if isinstance(event, Aborted) and actor.role not in self.twins:
            self.given_up.add(event.attempt)
            self._undone(event.attempt, process)
        if isinstance(event, Committed):
            self.world.outcome.commits += 1
        if isinstance(event, (Committed, Serving)) and getattr(actor, "engine", 0) is None:
            self.directory(actor)  # type: ignore[arg-type]
        if isinstance(event, Serving):
            self.serving[process.name] = event.version
            if event.version < self.served.get(actor.role, 0):
                self.world.fail("served", f"{process} fell from {self.served[actor.role]} to {event.version}")
            self.served[actor.role] = max(self.served.get(actor.role, 0), event.version)

    # -- the ledger -----------------------------------------------------------------------------------------------

    def _created(self, key: str, body: bytes, by: Process) -> None:
        if not key.startswith("ledger/"):
            return
        seq = int(key[7:-5])
        if self.tip is None:
            if seq != 0:
                self.world.fail("history", f"{by} began the ledger with record {seq}")
                return
            self.tip, self.records[0] = begin(body)
            return
        if seq != self.tip.seq + 1:
            self.world.fail("history", f"{by} wrote record {seq} after {self.tip.seq}")
            return
        step = fold(self.tip, body)
        self.tip = step.tip
        if step.record is None:
            if not self.void_allowed:
                self.world.fail("history", f"{by} wrote record {seq}, which is void: {step.void}")
            return
        self.records[seq] = step.record
        if isinstance(step.record, Seal):
            self._sealed(step.record, by)
        if isinstance(step.record, Anchor):
            self._anchored(step.record, by)

    def _sealed(self, seal: Seal, by: Process) -> None:
        """The version is exactly what the trainer gave, and can be made from the one before with what is durable."""
        world = self.world
        world.outcome.sealed += 1
        if seal.version != len(self.versions):
            world.fail("history", f"version {seal.version} was sealed after {len(self.versions) - 1}")
            return
        source = (seal.source or {}).get("path")
        given = self.checkpoints.get(source, []) if source else [self.attempts.get(seal.attempt)]
        try:
            found = self.applied(self.versions[-1], seal)
            vector = np.frombuffer(self._read(seal.fingerprint), "<u8")
        except (KeyError, DcrError, ValueError) as error:
            world.fail("sealed", f"version {seal.version} cannot be made: {type(error).__name__}: {error}")
            return
        if not any(lanes is not None and same(found, lanes) for lanes in given):
            world.fail("sealed", f"version {seal.version} of {by} is not what its trainer gave")
        if not np.array_equal(vector, vector_of(found)):
            world.fail("sealed", f"version {seal.version} has a vector of other weights")
        self._joined(seal, by)
        if seal.attempt in self.given_up:
            self.world.fail("told", f"version {seal.version} of {by} was sealed; a rank has said that it is given up")
        self.versions.append(found)
        self.seals[seal.version] = seal

    def _joined(self, seal: Seal, by: Process) -> None:
        """One part of each rank of one group, which together held the base, every element once (must P3)."""
        parts = [records.decode_part(self._read(ref)) for ref in seal.parts]
        groups = {part.group for part in parts}
        ranks = sorted(part.rank for part in parts)
        if len(groups) != 1 or ranks != list(range(self.groups.get(min(groups), 1))):
            self.world.fail("parts", f"version {seal.version} of {by} is made of ranks {ranks} of {sorted(groups)}")
        sums = [np.frombuffer(self._read(part.sums), "<u8").reshape(2, -1) for part in parts]
        before, after = np.sum(sums, axis=0, dtype=np.uint64)
        stray = any(part.stray for part in parts)
        if not stray and not np.array_equal(before, vector_of(self.versions[-1])):
            self.world.fail("parts", f"what the ranks of version {seal.version} held is not version {seal.base}")
        if not np.array_equal(after, np.frombuffer(self._read(seal.fingerprint), "<u8")):
            self.world.fail("parts", f"what the ranks of version {seal.version} hold now is not its fingerprint")

    def _read(self, ref: ObjectRef) -> bytes:
        body = self.world.bucket.objects[ref.key]
        if records.digest(body) != ref.sha256:
            raise ValueError(f"{ref.key} has other bytes than its digest says")
        return body

    def applied(self, base: Lanes, seal: Seal) -> Lanes:
        """The version after `base`, from nothing but the bucket."""
        fresh = [bits.copy() for bits in base]
        for ref in seal.parts:
            part = records.decode_part(self._read(ref))
            for place in part.chunks:
                chunk = open_chunk(self._read(ObjectRef(place.key, place.size, place.sha256)), LAYOUT)
                for n, segment in enumerate(chunk.segments):
                    changes, bits = chunk.changes(n), fresh[segment.tensor]
                    where = segment.box.canonical(changes.positions)
                    bits[where] = changes.resolve(bits[where])
        return fresh

    def _anchored(self, anchor: Anchor, by: Process) -> None:
        """What it names is there, and is the version, whole."""
        try:
            index = records.decode_anchor_index(self._read(anchor.index))
            lanes = [np.zeros_like(bits) for bits in self.versions[0]]
            for ref in index.files:
                for tensor, box, bits in read_pieces(SafetensorsBytes(self._read(ref), ref.key), LAYOUT):
                    where = slice(None) if box is None else box.canonical(np.arange(box.elements, dtype=np.int64))
                    lanes[tensor][where] = bits
            for ref in index.extras:
                self._read(ref)
        except (KeyError, DcrError, ValueError) as error:
            self.world.fail("anchor", f"that of {anchor.version} by {by}: {type(error).__name__}: {error}")
            return
        if not same(lanes, self.versions[anchor.version]):
            self.world.fail("anchor", f"that of version {anchor.version} by {by} holds other weights")
        refs = {anchor.index.key, *(ref.key for ref in [*index.files, *index.extras])}
        self.anchors[anchor.version] = (refs, lanes)

    def way_in(self) -> None:
        """Every version at or above the floor can be made from the bucket, bit for bit."""
        floor = self.tip.state.floor if self.tip else 0
        lanes = self.versions[0]
        if floor not in self.anchors and floor:
            self.world.fail("lost", f"no anchor leads to the floor {floor}")
            return
        if floor:
            refs, lanes = self.anchors[floor]
            if missing := [key for key in refs if key not in self.world.bucket.objects]:
                self.world.fail("lost", f"the anchor of the floor {floor} lacks {missing[0]}")
        for version in range(floor + 1, self.head + 1):
            try:
                lanes = self.applied(lanes, self.seals[version])
            except (KeyError, DcrError, ValueError) as error:
                self.world.fail("lost", f"version {version} cannot be made again: {type(error).__name__}: {error}")
                return
            if not same(lanes, self.versions[version]):
                self.world.fail("lost", f"version {version} is not what it was")

    def _deleted(self, key: str, by: Process) -> None:
        """Nothing is deleted that is sealed and above the floor, an anchor in use, or of an open attempt."""
        if self.tip is None or key.startswith(("probe/", "replicas/")):
            return
        kind, _, rest = key.partition("/")
        state = self.tip.state
        if kind not in ("data", "anchors"):
            self.world.fail("deleted", f"{by} deleted {key}")
            return
        version, attempt = (int(part) for part in rest.split("/")[:2])
        if kind == "data":
            seal = self.seals.get(version)
            if seal is not None and seal.attempt == attempt and version >= state.floor:
                self.world.fail("deleted", f"{by} deleted {key}; the floor is {state.floor}")
            if state.open is not None and state.open.seq == attempt:
                self.world.fail("deleted", f"{by} deleted {key} of the open attempt")
        elif any(key in refs for known, (refs, _) in self.anchors.items() if known >= state.floor):
            self.world.fail("deleted", f"{by} deleted {key}; the floor is {state.floor}")

    # -- engines --------------------------------------------------------------------------------------------------

    def expected(self, version: int) -> list[dict[str, bytes]]:
        if version not in self._states:
            self._states[version] = expected_states(self.versions[version])
        return self._states[version]

    def engine(self, engine: SimEngine) -> None:
        """After every step of an engine: what it serves is one sealed version, the one it reports, on every rank."""
        if not engine.alive:
            return
        core, world = engine.core, self.world
        was, self._running[engine] = self._running.get(engine, False), engine.serving
        self._noticed(engine)
        if core.state.proved is not None and not engine.foreign and core.state.begun is None:
            if core.state.proved >= len(self.versions):
                world.fail("mixture", f"{engine.role} says it is at version {core.state.proved}, which nobody sealed")
            elif not self._is(engine, core.state.proved):
                world.fail("mixture", f"{engine.role} is not at version {core.state.proved}, as it reports")
        if not engine.serving:
            return
        if core.state.begun is not None or any(worker._dcr_session.dirty for worker in engine.workers):
            world.fail("mixture", f"{engine.role} serves while {core.state.begun} is begun or a rank is dirty")
        if core.state.proved is None:
            if not engine.foreign:
                world.fail("mixture", f"{engine.role} serves unproved weights")
            return
        if core.state.proved < engine.served:
            world.fail("served", f"{engine.role} fell from version {engine.served} to {core.state.proved}")
        if not was and engine.process.name not in self._were_ready:
            self._were_ready.add(engine.process.name)
            self._ready(engine, core.state.proved)
        engine.served = max(engine.served, core.state.proved)

    def _noticed(self, engine: SimEngine) -> None:
        """What others did to the weights excuses them until the engine says anything new of itself.

        A bit that flipped excuses them until an attach has summed everything: one that flips between that and the
        proof is for the scrub to find.
        """
        if engine.foreign and engine.core.state.proved != engine.foreign[0]:
            engine.foreign = None
        if engine.core.state.proved is None:
            engine.forget_flips(engine.summed)

    def _is(self, engine: SimEngine, version: int) -> bool:
        """Whether it holds a version. A bit that flipped stays, or is written over by a version that changes it."""
        states, wanted = engine.states(), self.expected(version)
        if states == wanted:
            engine.forget_flips(len(engine.flips))
        return states == wanted or states == engine.with_flips(wanted)

    def _ready(self, engine: SimEngine, version: int) -> None:
        """Born unready: it becomes ready only at the newest version that was sealed when the subscriber that resumes it
        began. That one may be dead by now, if the engine was stopped while it was called."""
        wanted = self.heads.get(engine.caller, 0)
        if version < wanted:
            self.world.fail("ready", f"{engine.role} became ready at {version}; version {wanted} was sealed before")

    def directory(self, replica: Replica) -> None:
        """A loader that does not refuse it finds one sealed version, the one it is marked with."""
        path = replica.directory
        if not (path / CONFIG).exists() or (path / DIRTY).exists():
            return
        marker = Checkout(path).marker()
        if marker is None:
            return
        try:
            with Checkpoint(path) as found:
                lanes = [found.bits(spec.name).copy() for spec in LAYOUT]
        except DcrError as error:
            self.world.fail("mixture", f"{replica.role}: {error}")
            return
        if marker.version >= len(self.versions) or not same(lanes, self.versions[marker.version]):
            self.world.fail("mixture", f"{replica.role} has other files than version {marker.version}, its mark")

    def _died(self, process: Process) -> None:
        for replica in self.replicas:
            if replica.engine is None and replica.machine is process.machine:
                self.directory(replica)
