"""The weights of one rank on their way into attempts: mapped once, agreed upon by all ranks, then read at every update.

    once:            declare ─► (verdict) ─► probe ─► (verdict) ─► share
    at every update: bind ─► share, residual

Mapping and its probes are `projection`'s; what all ranks agree on is decided by rank 0 from their declarations. The
first round asks what a rank finds out by itself, so that one that cannot go on says so before any collective call; the
second what the ranks find out together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import Block, BlockSet, split_tensor
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Emit, Mapped
from dcr_daemon.ledger.records import Open
from dcr_daemon.publish.rank import Rank, distributed

if TYPE_CHECKING:
    from dcr_daemon.projection.agreement.gate import Declaration, Verdict
    from dcr_daemon.projection.binding.bind import Live
    from dcr_daemon.projection.binding.reader import Reader
    from dcr_daemon.projection.binding.residual import Exporter, ExportHook, Residual
    from dcr_daemon.projection.frameworks.megatron.live import Megatron
    from dcr_daemon.projection.region_map import Map
    from dcr_daemon.projection.tracing import Conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the tensors do not show by themselves of how a trainer lays its weights out.

    Attributes:
        replica: number of this rank, and how many, among the ranks that hold alike what no device mesh counts: plain
            tensors on pipeline stages, a mesh of a part of the ranks.
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


class Projected:
    """One rank's projection; used by the training thread, but for `judge` and what `blocks` gives.

    Args:
        ignore: globs of names outside the layout to drop.
        limit: bytes of weights in a block.
    """

    def __init__(
        self, trainer: Trainer, rank: Rank, layout: Layout, ignore: Sequence[str], limit: int, emit: Emit
    ) -> None:
        self._trainer, self._rank, self._layout, self._ignore = trainer, rank, layout, ignore
        self._limit, self._emit = limit, emit
        self._began = runtime.monotonic()
        self._live: Live | None = None
        self._probed: dict[str, str] = {}
        self._declaration: Declaration | None = None
        self._verdict: Verdict | None = None
        self._reader: Reader | None = None
        self._residual: Residual | None = None
        self._blocks: BlockSet | None = None

    @property
    def agreed(self) -> bool:
        """Whether all ranks know what they hold."""
        return self._blocks is not None

    def declare(self, weights: Any, record: Open) -> bytes:
        """What this rank holds, by itself.

        Raises:
            Incompatible: names, shapes or dtypes that have no place in the layout, all of them in one error.
        """
        from dcr_daemon.projection.binding.bind import live
        from dcr_daemon.projection.probes import self_check

        trainer, rank = self._trainer, self._rank
        self._began = runtime.monotonic()
        self._live = found = live(
            weights, self._layout, rank=rank.number, world=rank.world, replica=trainer.replica, ignore=self._ignore,
            conversion=trainer.conversion, adapter=trainer.adapter, megatron=trainer.megatron, mapped=trainer.mapped,
        )  # fmt: skip
        probed = self_check.probe(
            found.inputs, found.map, self._layout, conversion=found.conversion, convert=found.convert
        )
        self._probed = dict(probed.residual)
        return self._declared(record)

    def probe(self, record: Open) -> bytes:
        """What this rank holds, after the probes that all ranks take part in (collective)."""
        from dcr_daemon.projection.binding.reader import Reader
        from dcr_daemon.projection.probes.device_mesh import probe_meshes
        from dcr_daemon.projection.probes.export_check import asked, probe_export

        live = self._known
        if distributed() and self._rank.world > 1:
            self._probed |= probe_meshes(live.inputs, live.map, self._layout).residual
        if self._trainer.export is not None:
            reader = Reader(live, self._layout)
            names = asked(self._layout)
            self._probed |= probe_export(self._exporter, reader.read, live.map, self._layout, names).residual
        return self._declared(record)

    def _declared(self, record: Open) -> bytes:
        from dcr_daemon.projection.agreement.gate import declare, encode_declaration

        live, rank, export = self._known, self._rank, self._exporter
        computed = set(live.conversion.opaque) if live.conversion else set()
        can = self._trainer.export is not None or not (self._trainer.megatron or self._trainer.mapped)
        self._declaration = declare(
            live.map, self._layout, group=rank.group, call=record.call, attempt=record.seq, rank=rank.number,
            world=rank.world, nonce=rank.nonce, export=export.kind if can else "", buildable=export.can_build,
            partners=export.partners if self._numbered_alike else None, probed=self._probed, computed=computed,
            dropped=live.dropped,
        )  # fmt: skip
        return encode_declaration(self._declaration)

    @property
    def _numbered_alike(self) -> bool:
        """Whether the ranks of meshes and process groups are called as those that publish."""
        group = distributed()
        return bool(group) and (group.get_rank(), group.get_world_size()) == (self._rank.number, self._rank.world)

    @property
    def _known(self) -> Live:
        assert self._live is not None
        return self._live

    @property
    def _exporter(self) -> Exporter:
        from dcr_daemon.projection.binding.residual import Gather, Hook

        if self._trainer.export is not None:
            return Hook(self._trainer.export, self._layout)
        live = self._known
        return Gather(lambda: self._known.inputs, self._layout, live.conversion, live.convert)

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
        return encode_verdict(judge(declarations, self._layout))

    def hear(self, verdict: bytes) -> None:
        """Take rank 0's verdict.

        Raises:
            Corrupt: it is none, or judges another process than this one.
        """
        from dcr_daemon.projection.agreement.gate import decode_verdict

        try:
            self._verdict = decode_verdict(verdict)
        except ValueError as error:
            raise Corrupt(f"rank 0's verdict cannot be read: {error}") from error
        assert self._declaration is not None
        if not self._verdict.admits(self._declaration):
            raise Corrupt(
                f"rank 0's verdict is about another process than this {self._rank}",
                hint="two processes believe to be one rank: end all of the group, and start it anew",
            )

    def settle(self) -> BlockSet:
        """The verdict is the last one: what this rank keeps a baseline of from now on."""
        from dcr_daemon.projection.binding.reader import Reader, blocks
        from dcr_daemon.projection.binding.residual import Residual

        verdict, layout, rank = self._verdict, self._layout, self._rank
        assert verdict is not None
        self._live = live = self._known.without(verdict.residual)
        self._reader = Reader(live, layout)
        self._residual = Residual(verdict, layout, rank.number, self._exporter)
        if rank.world == 1:  # all of it, and as every other process that publishes alone keeps it
            owned = BlockSet.whole(layout, self._limit)
        else:
            whole = [layout.index(name) for name in self._residual.owned]
            direct = [Block(tensor, box) for tensor, box in blocks(live.map, layout, self._limit)]
            owned = BlockSet(
                layout, [*direct, *(b for t in sorted(whole) for b in split_tensor(t, layout[t], self._limit))]
            )
        self._blocks = owned
        self._direct = [n for n, block in enumerate(owned) if layout[block.tensor].name not in verdict.residual]
        if rank.leads:
            self._emit(
                Mapped(
                    ranks=rank.world, direct_bytes=verdict.direct_bytes, residual_bytes=verdict.residual_bytes,
                    regions=verdict.boxes, report=verdict.report(layout), seconds=runtime.monotonic() - self._began,
                )
            )  # fmt: skip
        return owned

    def bind(self, weights: Any) -> None:
        """Read these weights from now on.

        Raises:
            Incompatible: they are not laid out as those that the ranks agreed on.
        """
        self._live = self._known.rebind(weights).without(self._verdict.residual if self._verdict else {})
        assert self._reader is not None
        self._reader.bind(self._live)

    def devices(self) -> Iterator[Any]:
        """Where this rank's tensors are."""
        return (tensor.device for tensor in self._known.tensors.values())

    def blocks(self) -> Iterator[tuple[int, Callable[[], Bits]]]:
        """What this rank projects: numbers of blocks, each with what reads it on any thread."""
        reader, blocks = self._reader, self._blocks
        assert reader is not None
        assert blocks is not None
        return ((n, partial(reader.read, blocks[n].tensor, blocks[n].box)) for n in self._direct)

    @property
    def exports(self) -> bool:
        """Whether several ranks together construct what is residual."""
        return self._rank.world > 1 and self._residual is not None and bool(self._residual.names)

    def residual(self) -> Generator[tuple[int, Any, bool], None, None]:
        """Residual tensors that this rank owns: layout index, tensor, whether it travels as an overwrite (collective).

        To be driven to its end on every rank; closing it does.
        """
        assert self._residual is not None
        with closing(self._residual.iterate()) as tensors:
            for index, tensor in tensors:
                yield index, tensor, index in self._residual.overwrites
