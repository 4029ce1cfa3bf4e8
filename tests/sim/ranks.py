"""A process group: ranks that publish one stream together, and what starts all of them again when one ends.

Each rank holds boxes of the toy model as torch tensors and runs what `Publisher` runs on it: the real projection, gate,
session or member, in the order that `publish.shards` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sim.actors import CHUNK, RESTART, SPOOL, Actor
from sim.clock import Process
from sim.trainer import Lanes, Trainer, save
from support.tensors.partitions import SPLITS, split
from support.vllm.toy_model import LAYOUT

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.region import Region, row_major
from dcr_daemon.checkpoint.blocks import block_bytes
from dcr_daemon.errors import DcrError, Fenced
from dcr_daemon.events import Event, Sealed
from dcr_daemon.projection.region_map import Map, shards_of
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.group import update_steps
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.opening import open_coordinator
from dcr_daemon.publish.group.projected import RankProjection
from dcr_daemon.publish.group.projected import Trainer as Laid
from dcr_daemon.publish.group.update_inputs import RankShards
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.rank import Rank
from dcr_daemon.publish.version.attempt import Attempt

if TYPE_CHECKING:
    from sim.disk import Machine
    from sim.invariants import Watch
    from sim.world import World

LAG = 6.0  #: seconds of silence after which rank 0 gives a rank up
TIRED = 25  #: calls in a row that fail before a trainer gives up and its group is started anew
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "I64": torch.int64}


class Cut:
    """How one incarnation of a group lays the model out: whose which boxes are, and who holds copies besides.

    `residual`: names that nobody maps, so that an export has to give them.
    """

    def __init__(self, world: World, ranks: int) -> None:
        rng = world.rng
        numbers = np.random.default_rng(rng.getrandbits(32))
        how = rng.choice((*SPLITS, "mixed", "one each"))
        self.boxes: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
        self.copies: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
        idle = rng.randrange(1, ranks) if ranks > 2 and rng.random() < 0.3 else -1  # the source of nothing
        for spec in LAYOUT:
            way = rng.choice(SPLITS) if how == "mixed" else how
            whole = [Box.flat(0, spec.elements)]
            pieces = whole if way == "one each" else split(way, spec.shape, ranks, numbers)
            first = rng.randrange(ranks)
            for n, piece in enumerate(pieces):
                owner = (first + n) % ranks
                owner = (owner + 1) % ranks if owner == idle else owner
                self.boxes[owner].setdefault(spec.name, []).append(piece)
                if rng.random() < 0.1:
                    self.copies[(owner + 1) % ranks].setdefault(spec.name, []).append(piece)
        self.residual = rng.sample([spec.name for spec in LAYOUT], rng.choice((0, 0, 1, 3)))

    def map(self, rank: int) -> Map:
        """What a rank is the source of, and the copies that it holds of others'."""
        made = []
        for table, owned in ((self.boxes[rank], True), (self.copies[rank], False)):
            for name, boxes in table.items():
                if name in self.residual:
                    continue
                for n, box in enumerate(boxes):
                    region = Region(name, box.shape, 0, row_major(box.shape), box.dst, box.strides)
                    dtype = LAYOUT[LAYOUT.index(name)].dtype
                    parameter, regions = _local(name, n, owned=owned), [region] if owned else []
                    made += shards_of(parameter, (box.elements,), dtype, regions, LAYOUT)
        return Map(tuple(made), dict.fromkeys(self.residual, "the simulation does not map it"))

    def tensors(self, rank: int, lanes: Lanes) -> dict[str, Any]:
        """The local tensors of a rank, when the whole model is `lanes`."""
        return {
            _local(name, n, owned=owned): _tensor(name, lanes, box)
            for table, owned in ((self.boxes[rank], True), (self.copies[rank], False))
            for name, boxes in table.items()
            if name not in self.residual
            for n, box in enumerate(boxes)
        }


def _local(name: str, n: int, *, owned: bool) -> str:
    return f"{name}/{n}" if owned else f"{name}/{n}/copy"


def _tensor(name: str, lanes: Lanes, box: Box | None = None) -> Any:
    """Elements of a canonical tensor as torch has them: all of it in its shape, or those of a box."""
    spec = LAYOUT[LAYOUT.index(name)]
    bits = lanes[LAYOUT.index(name)]
    if box is not None:
        bits = bits[box.canonical(np.arange(box.elements, dtype=np.int64))]
    signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    made = torch.from_numpy(signed.copy()).view(_TORCH[spec.dtype])
    return made.reshape(spec.shape) if box is None else made


class Incarnation:
    """One start of a group: its id, its cut, and the weights of each call of `publish`, alike for all ranks."""

    def __init__(self, trainer: Trainer, ranks: int, cut: Cut) -> None:
        self.id, self.ranks, self.cut = runtime.nonce(4), ranks, cut
        self._trainer = trainer
        self._calls: list[tuple[int, Lanes]] = []
        self.shift: dict[int, int] = {}  #: of a rank: by how many calls its trainer is ahead

    @property
    def called(self) -> int:
        return len(self._calls)

    def weights(self, call: int) -> tuple[int, Lanes]:
        """Step and weights of a call, drawn when the first rank comes to it."""
        while len(self._calls) < call:
            lanes = self._trainer.next()
            self._calls.append((self._trainer.steps, lanes))
        return self._calls[call - 1]


class SimRank(Actor):
    """One rank of one incarnation. It is never started again by itself: `Group` starts all."""

    def __init__(self, group: Group, of: Incarnation, number: int, machine: str) -> None:
        super().__init__(group.world, group.watch, f"rank{number}", machine)
        self.group, self.of, self.number = group, of, number
        self.session: Coordinator | None = None
        self.calls = self.failures = 0
        self.skipped: set[int] = set()  #: calls that its trainer leaves out
        self.broken: set[int] = set()  #: calls for which it has not all of its tensors
        self._behind: asyncio.Task[None] | None = None
        self._lanes: Lanes = []
        base = self.machine.disk / "base"
        if not base.exists():
            save(group.trainer.base, base)
            self.machine.keep_all()

    async def main(self, process: Process) -> None:
        emit, world = self.emit(process), self.world
        rank = Rank(self.of.id, self.number, self.of.ranks)
        store = world.store(process, emit=emit)
        options = PublishOptions(**self.group.publish_options(self.machine))
        session = self.session = await open_coordinator(options, store, emit=emit, rank=rank)
        mapped, export = self.of.cut.map(self.number), self._export if self.of.cut.residual else None
        projection = RankProjection(
            Laid(mapped=mapped, export=export), rank, layout=session.layout, ignore=(),
            limit=block_bytes(CHUNK), emit=emit
        )  # fmt: skip
        try:
            while True:
                checks = asyncio.ensure_future(self._run_idle_checks(session))
                await asyncio.sleep(self.group.pause * world.rng.uniform(0.3, 1.5))
                checks.cancel()
                await asyncio.wait([checks])
                if self.group.wants(self):
                    self.calls += 1
                    await self._publish(process, session, projection)
                elif self._behind and self._behind.done():
                    await self._wait_behind()
        finally:
            await self._close(session)

    async def _run_idle_checks(self, session: Coordinator) -> None:
        """Between updates; what goes wrong is met again by the next one."""
        with contextlib.suppress(DcrError):
            if self._behind:
                await asyncio.wait([self._behind])
            while True:
                await session.run_idle_checks()
                await session.repair()

    def emit(self, process: Process) -> Callable[[Event], None]:
        right, world = super().emit(process), self.world

        def tell(event: Event) -> None:
            right(event)
            if (
                isinstance(event, Sealed)
                and self.session
                and not world.healed
                and self.group.flips > world.rng.random()
            ):
                self._flip(self.session.context.baseline)

        return tell

    def _flip(self, baseline: Baseline) -> None:
        """One bit of what this rank holds."""
        rng = self.world.rng
        if len(baseline.blocks):
            bits = baseline[rng.randrange(len(baseline.blocks))]
            self.world.outcome.faults["baseline bit flipped"] += 1
            bits[rng.randrange(bits.size)] ^= bits.dtype.type(1 << rng.randrange(8 * bits.itemsize))

    def _export(self, names: Sequence[str]) -> Iterable[tuple[str, Any]]:
        return ((name, _tensor(name, self._lanes)) for name in names)

    async def _publish(self, process: Process, session: Coordinator, projection: RankProjection) -> None:
        """One call of `publish`; the seal goes on behind, as it does there."""
        call = self.calls
        try:
            session.start_lag_timer()
            await self._wait_behind()
            if call in self.skipped:
                raise Skipped(f"call {call} is left out by this trainer")
        except DcrError as error:
            if isinstance(error, Fenced):
                raise
            with contextlib.suppress(DcrError):
                await session.skip(call=call, reason=str(error))
            self._failed(error)
            return
        step, self._lanes = self.of.weights(call + self.of.shift.get(self.number, 0))
        weights = self.of.cut.tensors(self.number, self._lanes)
        if call in self.broken:
            weights = dict(list(weights.items())[1:])
        try:
            attempt = await update_steps.diff_update(
                session, RankShards(projection, weights), step=step, call=call, on_loop=lambda work: work
            )
        except DcrError as error:
            await self._settle(session, error)
            self._holds(process, session)
            self._failed(error)
            return
        if self.number == 0:
            self.watch.gave(attempt.id, self._lanes)
        self._behind = asyncio.ensure_future(self._complete(process, session, attempt))

    async def _complete(self, process: Process, session: Coordinator, attempt: Attempt) -> None:
        try:
            await session.seal(attempt, metadata={"n": self.calls})
        except DcrError as error:
            if not await self._settle(session, error):
                self._failed(error)
                self._holds(process, session)
                return
        self.failures = 0
        if self.number == 0:
            self.group.sealed()
        if not self.group.flips:
            self._holds(process, session)
        try:
            await session.anchor_if_due()
        except DcrError as error:
            if isinstance(error, Fenced):
                raise
            self.world.note(f"no anchor: {error}", process)
        self._holds(process, session)

    def _holds(self, process: Process, session: Coordinator) -> None:
        if self.group.lies and not session.context.committed:
            return  # a share built on a damaged cache is found when rank 0 joins the sums, not before (must P3)
        ours = self in self.group.ranks and not self.group.twins and not self.group.down
        self.watch.holds(process, session, newest=ours)

    async def _settle(self, session: Coordinator, error: DcrError) -> bool:
        """Whether it was sealed after all; being fenced ends the trainer."""
        sealed = None
        try:
            sealed = await session.abort_unless_sealed(error)
        except Fenced:
            raise
        except DcrError as later:
            self.world.note(f"in doubt: {later}", self.process)
        if isinstance(error, Fenced):
            raise error
        return sealed is not None

    async def _wait_behind(self) -> None:
        if self._behind:
            await asyncio.wait([self._behind])
            behind, self._behind = self._behind, None
            behind.result()

    def _failed(self, error: DcrError) -> None:
        self.world.note(f"call {self.calls} fails: {type(error).__name__}: {error}", self.process)
        self.failures += 1
        self.group.failed(self)
        if self.failures > TIRED:
            raise error

    async def _close(self, session: Coordinator) -> None:
        if self._behind:
            self._behind.cancel()
            await asyncio.wait([self._behind])
        await session.close()

    def _again(self, error: BaseException | None) -> None:
        self.group.ended(self, error)


class Skipped(DcrError):
    """A trainer leaves a call out."""


class Group:
    """Starts a group, and starts it anew, all of it, when a rank ends: with another id, world and cut.

    It has the interface of `SimPublisher` that `ScenarioRun` uses.
    """

    def __init__(
        self, world: World, watch: Watch, trainer: Trainer, *, role: str = "group1", name: str = "main",
        updates: int = 4, worlds: Sequence[int] = (2, 3, 4), pause: float = 3.0, nodes: int = 2, flips: float = 0.0,
        lies: float = 0.0, steady: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.world, self.watch, self.trainer = world, watch, trainer
        self.role, self.name, self.left, self.pause = role, name, updates, pause
        self.worlds, self.nodes, self.options = worlds, nodes, options
        self.steady = steady  #: every incarnation is as the first one, so that caches are of use
        self.flips, self.lies = flips, lies  #: how likely a baseline is damaged after a seal; a cache, at a start
        self.down = False
        self.ranks: list[SimRank] = []
        self.leftovers: list[SimRank] = []
        self.twins: list[SimRank] = []
        self.exits: list[BaseException | None] = []
        self.of: Incarnation | None = None
        self.failures = 0  #: calls of rank 0 that came to nothing since the faults ended
        self._ending = False

    # -- as a publisher -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return any(rank.alive for rank in self.ranks)

    @property
    def session(self) -> Coordinator | None:
        return self.ranks[0].session if self.ranks and self.ranks[0].alive else None

    @property
    def process(self) -> Process | None:
        return next((rank.process for rank in self.ranks if rank.alive), None)

    def publish_options(self, machine: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "state": machine.disk / "state", "base": machine.disk / "base", "create": True, "name": self.name,
            "chunk_bytes": CHUNK, "spool_memory": SPOOL, "upload_backlog": 2 * CHUNK, "uploads": 2, "patience": 30.0,
            "anchor_every": 3, "workers": 2, "scrub_rate": 60.0, "lag": LAG, "look": 4.0,
        }  # fmt: skip
        return {**chosen, **self.options}

    # -- incarnations ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """One more incarnation."""
        if self.down or self.alive or self.world.ended:
            return
        self._ending = False
        for number in range(self.nodes):
            self._lie(self.world.machine(f"{self.role}node{number}"))
        if self.of and self.steady:
            ranks, cut = self.of.ranks, self.of.cut
        else:
            ranks = self.world.rng.choice(self.worlds)
            cut = Cut(self.world, ranks)
        of = self.of = Incarnation(self.trainer, ranks, cut)
        self.watch.groups[of.id] = of.ranks
        self.world.note(f"{self.role} starts {of.ranks} ranks as {of.id}")
        self.ranks = [SimRank(self, of, n, self._node(n)) for n in range(of.ranks)]
        for rank in self.world.rng.sample(self.ranks, len(self.ranks)):
            rank.start()

    def _lie(self, machine: Machine) -> None:
        """What the ranks of a machine will find in their caches is not what they left there."""
        rng = self.world.rng
        for file in sorted(machine.disk.glob("state/**/baseline.*")):
            if rng.random() >= self.lies or self.world.healed:
                continue
            self.world.outcome.faults["cache damaged"] += 1
            body = bytearray(file.read_bytes())
            if file.suffix == ".json":  # it names another version: the bytes are as its sums say, and are not that one
                version = rng.randint(0, self.watch.head)
                body = bytearray(re.sub(rb'"version":\d+', b'"version":%d' % version, bytes(body)))
            else:
                body[: 1 + len(body) % 600] = rng.randbytes(1 + len(body) % 600)
            file.write_bytes(body)

    def twin(self, number: int) -> SimRank | None:
        """One more process that believes to be a rank of the present incarnation."""
        if self.of is None or number >= len(self.ranks) or not self.ranks[number].alive:
            return None
        twin = SimRank(self, self.of, number, f"{self.role}elsewhere")
        twin.calls = self.ranks[number].calls
        self.twins.append(twin)
        self.watch.twins.add(twin.role)
        twin.start()
        return twin

    def _node(self, number: int) -> str:
        """The machine of a rank; another one if a rank that was left over still sits there."""
        name = f"{self.role}node{number % self.nodes}"
        busy = {rank.machine.name for rank in self.leftovers if rank.alive and rank.number == number}
        while name in busy:
            name += "x"
        return name

    def leave_over(self, number: int) -> None:
        """A rank of the present incarnation will survive the end of its group, unnoticed."""
        if number < len(self.ranks):
            self.leftovers.append(self.ranks[number])

    def ended(self, rank: SimRank, error: BaseException | None) -> None:
        """A rank is gone: the launcher ends the others, and starts all anew."""
        if isinstance(error, Fenced) and rank in self.ranks and rank not in self.leftovers:
            self.down = True  # must P6
        if rank not in self.ranks or self._ending:
            return
        self.exits.append(error)
        self._ending = True
        self.world.loop.world_later(self.world.rng.uniform(0.0, 2.0), self._end_others)

    def _end_others(self) -> None:
        for rank in self.ranks:
            if rank not in self.leftovers and rank.alive and rank.process and not self.world.ended:
                self.world.kill(rank.process)
        self.ranks = []
        if not self.down:
            self.world.loop.world_later(RESTART * self.world.rng.uniform(0.5, 3.0), self.start)

    def end(self, *, kindly: bool) -> None:
        """The job is over: its ranks are terminated, or killed."""
        self.down = True
        for rank in self.ranks:
            if rank.alive and rank.process:
                if kindly and rank.process.main:
                    rank.process.main.cancel()
                else:
                    self.world.kill(rank.process)

    # -- calls ----------------------------------------------------------------------------------------------------

    def wants(self, rank: SimRank) -> bool:
        """Whether a rank's trainer has another call to make: what one has begun all make; a leftover goes on."""
        return rank.calls < rank.of.called or rank not in self.ranks or self.left > 0

    def sealed(self) -> None:
        self.left -= 1

    def failed(self, rank: SimRank) -> None:
        """A call comes to nothing; that counts where no fault, and nobody who has yet to catch up, is to blame."""
        calls = [one.calls for one in self.ranks]
        if rank.number == 0 and self.world.healed and rank in self.ranks and max(calls) - min(calls) <= 1:
            self.failures += 1

    def past_is_over(self) -> bool:
        """Whether no rank of an earlier incarnation goes on."""
        return not any(rank.alive for rank in self.leftovers if rank not in self.ranks)
