"""The weights of one rank on their way into attempts: mapped once, agreed upon by all ranks, then read at every update.

    once:            RankProjection.declare ─► FirstRound.probe ─► SecondRound.accept_verdict ─► AgreedProjection
    at every update: AgreedProjection.bind ─► blocks, residual

Each step returns an object; the next step is a method of that object. Between two steps all ranks exchange what they
declare, and rank 0 judges it (`Coordinator.agree` with `RankProjection.judge`). In the first round a rank declares what
it finds out by itself, so that one that cannot go on says so before any collective call; in the second round it
declares the results of the collective checks. Mapping and its probes are those of the package `projection`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import Block, BlockSet, split_tensor
from dcr_daemon.checkpoint.tied import UNTIE
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.events import Emit, Mapped
from dcr_daemon.ledger.records import Open
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.rank import Rank, distributed

if TYPE_CHECKING:
    from dcr_daemon.projection.agreement.gate import Verdict
    from dcr_daemon.projection.binding.bind import Live
    from dcr_daemon.projection.binding.residual import Exporter, ExportHook
    from dcr_daemon.projection.frameworks.megatron.live import Megatron
    from dcr_daemon.projection.region_map import Map
    from dcr_daemon.projection.tracing import Conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Facts about the layout of a trainer's weights that cannot be read from the tensors.

        Publisher("s3://bucket/run1", trainer=Trainer(megatron=Megatron.of_process(read_architecture("/models/base"))))

    Attributes:
        replica: (number, count) of this rank among the ranks that hold the same elements, where no device mesh says so:
            plain tensors on pipeline stages, a mesh over some of the ranks.
        megatron: architecture and grid of a Megatron model.
        adapter: torchtitan's state-dict adapter.
        conversion: what the export of another framework does to whole tensors (`projection.tracing.trace`).
        mapped: the finished map, for what nothing here understands.
        export: `export(names)`, called alike on every rank, gives whole canonical tensors in that order; for what
            cannot be projected.
    """

    replica: tuple[int, int] | None = None
    megatron: Megatron | None = None
    adapter: Any = None
    conversion: Conversion | None = None
    mapped: Map | None = None
    export: ExportHook | None = None

    @property
    def says(self) -> bool:
        """Whether anything was given."""
        return self != Trainer()


class RankProjection:
    """How this rank's weights become elements of the stream's layout. Used by the training thread, but for `judge`.

    Args:
        ignore: globs of names outside the layout to drop.
        limit: bytes of weights in a block, at most.
        tied: tensors of the layout that are one tensor of the model; only rank 0 needs them.

    Attributes:
        agreed: what all ranks agreed on last; None until they have.
    """

    def __init__(
        self, trainer: Trainer, rank: Rank, *, layout: Layout, ignore: Sequence[str], limit: int, emit: Emit,
        tied: TiedTensors | None = None,
    ) -> None:  # fmt: skip
        self.trainer, self.rank, self.layout, self.limit, self.emit = trainer, rank, layout, limit, emit
        self._ignore, self._tied = ignore, tied or TiedTensors()
        self.agreed: AgreedProjection | None = None

    def declare(self, weights: Any, record: Open) -> FirstRound:
        """Map the weights, and declare what this rank finds out by itself.

        Raises:
            Incompatible: names, shapes or dtypes that have no place in the layout, all of them in one error.
        """
        from dcr_daemon.projection.binding.bind import live
        from dcr_daemon.projection.probes import self_check

        trainer, rank, began = self.trainer, self.rank, runtime.monotonic()
        found = live(
            weights, self.layout, rank=rank.number, world=rank.world, replica=trainer.replica, ignore=self._ignore,
            conversion=trainer.conversion, adapter=trainer.adapter, megatron=trainer.megatron, mapped=trainer.mapped,
        )  # fmt: skip
        probed = self_check.probe(
            found.inputs, found.map, self.layout, conversion=found.conversion, convert=found.convert
        )
        return FirstRound(self, record, live=found, probed=dict(probed.residual), began=began)

    def judge(self, declared: Sequence[bytes]) -> bytes:
        """The verdict on all ranks' declarations; called on rank 0's worker.

        Raises:
            Incompatible: the ranks together do not publish the checkpoint, with tensors, elements and ranks.
            Corrupt: what a rank declares cannot be read.
        """
        from dcr_daemon.projection.agreement.gate import decode_declaration, encode_verdict, judge

        try:
            declarations = [decode_declaration(body) for body in declared]
        except ValueError as error:
            raise Corrupt(f"what a rank declares cannot be read: {error}") from error
        return encode_verdict(judge(declarations, self.layout, tied=self._tied.pairs))

    def exporter(self, live: Callable[[], Live]) -> Exporter:
        """What constructs residual tensors from the weights that `live` gives at that time."""
        from dcr_daemon.projection.binding.residual import Gather, Hook

        if self.trainer.export is not None:
            return Hook(self.trainer.export, self.layout)
        first = live()
        return Gather(lambda: live().inputs, self.layout, conversion=first.conversion, convert=first.convert)


class _Round:
    """One declaration of this rank, which all ranks exchange.

    Attributes:
        declaration: its bytes.
    """

    def __init__(
        self, projection: RankProjection, record: Open, *, live: Live, probed: dict[str, str], began: float
    ) -> None:
        from dcr_daemon.projection.agreement.gate import declare, encode_declaration

        self._projection, self._record, self._live, self._probed = projection, record, live, probed
        self._began = began
        trainer, rank, export = projection.trainer, projection.rank, projection.exporter(lambda: live)
        computed = set(live.conversion.opaque) if live.conversion else set()
        can = trainer.export is not None or not (trainer.megatron or trainer.mapped)
        self._declared = declare(
            live.map, projection.layout, group=rank.group, call=record.call, attempt=record.seq, rank=rank.number,
            world=rank.world, nonce=rank.nonce, export=export.kind if can else "", buildable=export.can_build,
            partners=export.partners if _numbered_alike(rank) else None, probed=probed, computed=computed,
            dropped=live.dropped,
        )  # fmt: skip
        self.declaration = encode_declaration(self._declared)

    def _read(self, verdict: bytes) -> Verdict:
        """Rank 0's verdict on this round.

        Raises:
            Corrupt: it is none, or judges another process than this one.
        """
        from dcr_daemon.projection.agreement.gate import decode_verdict

        try:
            read = decode_verdict(verdict)
        except ValueError as error:
            raise Corrupt(f"rank 0's verdict cannot be read: {error}") from error
        if not read.admits(self._declared):
            raise Corrupt(
                f"rank 0's verdict is about another process than this {self._projection.rank}",
                hint="two processes believe to be one rank: end all of the group, and start it anew",
            )
        return read


class FirstRound(_Round):
    """What this rank found out by itself."""

    def probe(self, verdict: bytes) -> SecondRound:
        """Rank 0 lets all ranks go on: take part in the probes of all ranks (collective), and declare anew.

        Raises:
            Corrupt: the verdict cannot be read, or is about another process.
        """
        from dcr_daemon.projection.binding.reader import Reader
        from dcr_daemon.projection.probes.device_mesh import probe_meshes
        from dcr_daemon.projection.probes.export_check import asked, probe_export

        self._read(verdict)
        projection, live, probed = self._projection, self._live, dict(self._probed)
        if distributed() and not projection.rank.alone:
            probed |= probe_meshes(live.inputs, live.map, layout=projection.layout).residual
        if projection.trainer.export is not None:
            reader, names = Reader(live, projection.layout), asked(projection.layout)
            exporter = projection.exporter(lambda: live)
            probed |= probe_export(
                exporter, reader.read, mapped=live.map, layout=projection.layout, names=names
            ).residual
        return SecondRound(projection, self._record, live=live, probed=probed, began=self._began)


class SecondRound(_Round):
    """What the ranks found out together."""

    def accept_verdict(self, verdict: bytes) -> AgreedProjection:
        """The verdict says what every rank publishes from now on.

        Raises:
            Corrupt: it cannot be read, or is about another process.
        """
        projection, read = self._projection, self._read(verdict)
        agreed = AgreedProjection(projection, read, live=self._live)
        if projection.rank.leads:
            projection.emit(
                Mapped(
                    ranks=projection.rank.world, direct_bytes=read.direct_bytes, residual_bytes=read.residual_bytes,
                    regions=read.boxes, report=read.report(projection.layout),
                    seconds=runtime.monotonic() - self._began,
                )
            )  # fmt: skip
        return agreed


class AgreedProjection:
    """What this rank publishes of its weights, as all ranks agreed.

    Attributes:
        owned: the blocks that this rank is the source of, and keeps a baseline of.
    """

    def __init__(self, projection: RankProjection, verdict: Verdict, *, live: Live) -> None:
        from dcr_daemon.projection.binding.reader import Reader, blocks
        from dcr_daemon.projection.binding.residual import Residual

        layout, rank, limit = projection.layout, projection.rank, projection.limit
        self._rank, self._verdict, self._layout = rank, verdict, layout
        self._live = live.without(verdict.residual).with_followers(verdict.follows)
        self._reader = Reader(self._live, layout)
        self._residual = Residual(verdict, layout, rank=rank.number, exporter=projection.exporter(lambda: self._live))
        if rank.alone:  # all of it, and as every other process that publishes alone keeps it
            self.owned = BlockSet.whole(layout, limit)
        else:
            whole = [layout.index(name) for name in self._residual.owned]
            direct = [Block(tensor, box) for tensor, box in blocks(self._live.map, layout, limit)]
            residual = [
                block for tensor in sorted(whole) for block in split_tensor(tensor, layout[tensor], limit=limit)
            ]
            self.owned = BlockSet(layout, [*direct, *residual])
        self._direct = [n for n, block in enumerate(self.owned) if layout[block.tensor].name not in verdict.residual]

    def bind(self, weights: Any) -> None:
        """Read these weights from now on.

        Raises:
            Incompatible: they are not laid out as those that the ranks agreed on.
        """
        self._live = self._live.rebind(weights).without(self._verdict.residual)
        self._reader.bind(self._live)

    def devices(self) -> Iterator[Any]:
        """Where this rank's tensors are."""
        return (tensor.device for tensor in self._live.tensors.values())

    def blocks(self) -> Iterator[tuple[int, Callable[[], Bits]]]:
        """What this rank reads from its weights: numbers of owned blocks, each with what reads it on any thread."""
        reader, owned = self._reader, self.owned
        return ((n, partial(reader.read, owned[n].tensor, owned[n].box)) for n in self._direct)

    @property
    def follows(self) -> Mapping[str, str]:
        """Tensors that no rank holds, each with the one that it follows."""
        return self._verdict.follows

    def check_followers(self, read: Callable[[int, Box], Bits]) -> None:
        """That those tensors have equal bits in the version from which is diffed: of each, this rank owns the boxes
        that it owns of the one that is followed.

        Args:
            read: a box of a layout tensor in that version.

        Raises:
            Incompatible: they differ, so they are two tensors of the model.
        """
        index = self._layout.index
        pairs = {index(name): index(source) for name, source in self.follows.items()}
        for block in self.owned:
            source = pairs.get(block.tensor)
            if source is not None and not np.array_equal(read(block.tensor, block.box), read(source, block.box)):
                head, embedding = self._layout[block.tensor].name, self._layout[source].name
                raise Incompatible(
                    f"the ranks hold no {head}, and in the stream it differs from {embedding}, to which config.json "
                    "ties it",
                    hint=UNTIE,
                )

    @property
    def exports(self) -> bool:
        """Whether several ranks together construct the residual tensors."""
        return not self._rank.alone and bool(self._residual.names)

    def residual(self) -> Generator[tuple[int, Any, bool], None, None]:
        """Residual tensors that this rank owns: layout index, tensor, whether it travels as an overwrite (collective).

        To be driven to its end on every rank; closing it does.
        """
        with closing(self._residual.iterate()) as tensors:
            for index, tensor in tensors:
                yield index, tensor, index in self._residual.overwrites


def _numbered_alike(rank: Rank) -> bool:
    """Whether the ranks of meshes and process groups have the numbers of those that publish."""
    group = distributed()
    return bool(group) and (group.get_rank(), group.get_world_size()) == (rank.number, rank.world)
