"""Megatron's process grid: which layers, experts and shares a rank has, from its number and the degrees.

Ranks count in Megatron's own order: tensor parallel ranks are neighbours, then context, then data; pipeline stages are
farthest apart. For experts the same ranks of a stage are divided differently: expert tensor ranks are neighbours, then
expert ranks, and the rest are replicas of experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcr_daemon.errors import UsageError
from dcr_daemon.projection.frameworks.megatron.parameter import LayerPosition, Parameter

HINT = "the degrees are those of the training run: --tp, --pp, --vpp, --cp, --ep, --etp, --dp"


@dataclass(frozen=True, slots=True)
class Holder:
    """One rank among those that hold a parameter: its share, and which replica of the share it is.

    `replicas` ranks hold the same elements; this rank is number `replica` of them, in rank order. Where the
    tensor-parallel ranks all hold everything, they are replicas, too.
    """

    rank: int
    share: int
    shares: int
    replica: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Degrees of parallelism. `stage_layers` are the layers of each stage's chunks in model order, where uneven.

    `dp` counts the replicas of a dense parameter apart from context parallel ones; experts then have
    tp · cp · dp / (ep · etp).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.vpp, self.cp, self.dp, self.ep, self.etp) < 1:
            raise UsageError("a degree of parallelism is at least 1", hint=HINT)
        if self.stage % (self.ep * self.etp):
            raise UsageError(
                f"{self.stage} ranks of a stage (tp · cp · dp) cannot hold ep · etp = {self.ep * self.etp} shares of "
                "experts",
                hint=f"--dp {self.ep * self.etp // math.gcd(self.ep * self.etp, self.tp * self.cp)} would fit",
            )

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp

    def chunks(self, layers: int) -> list[range]:
        """Layers of every chunk in model order: chunk c lies on stage c % pp, as its virtual stage c // pp.

        Raises:
            UsageError: the layers cannot be divided so.
        """
        count = self.pp * self.vpp
        sizes: Sequence[int] = self.stage_layers or [layers // count] * count
        if len(sizes) != count or sum(sizes) != layers:
            fair = [layers // count + (i < layers % count) for i in range(count)]
            raise UsageError(
                f"{layers} layers do not divide into {count} pipeline chunks"
                + (f" of {list(sizes)}" if self.stage_layers else ""),
                hint=f"say how they do, e.g. --stage-layers {','.join(map(str, fair))}",
            )
        ends = list(itertools.accumulate(sizes))
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def chunk_of(self, place: LayerPosition, chunks: Sequence[range]) -> int:
        """The chunk that has a parameter and owns it; where a later one repeats it (tied embeddings), the first."""
        if place.part == "first":
            return 0
        if place.part == "decoder":
            return next(i for i, layers in enumerate(chunks) if place.layer in layers)
        return len(chunks) - 1

    def local_expert(self, parameter: Parameter, experts: int) -> tuple[int, int] | None:
        """Expert rank that has an expert, and its number there."""
        if parameter.expert is None:
            return None
        if experts % self.ep:
            raise UsageError(f"{experts} experts do not divide over {self.ep} ranks", hint="choose another --ep")
        return divmod(parameter.expert, experts // self.ep)

    def replicas(self, parameter: Parameter, stage: int, expert_rank: int, share: int) -> tuple[int, ...]:
        """Ranks that hold the same share of a parameter, in rank order."""
        tensor, shards = self._ways(parameter)
        ranks = [
            (copy * shards + expert_rank) * tensor + stage * self.stage
            for copy in range(self.stage // (tensor * shards))
        ]
        if parameter.split.axis is None:
            return tuple(rank + one for rank in ranks for one in range(tensor))
        return tuple(rank + share for rank in ranks)

    def holder(self, parameter: Parameter, rank: int, expert_rank: int) -> Holder | None:
        """The share of one rank, if it is on the parameter's stage; `None` if the expert is another rank's."""
        tensor, shards = self._ways(parameter)
        copies = self.stage // (tensor * shards)
        rest, share = divmod(rank % self.stage, tensor)
        copy, at = divmod(rest, shards)
        if at != expert_rank:
            return None
        if parameter.split.axis is None:
            return Holder(rank, share, tensor, copy * tensor + share, copies * tensor)
        return Holder(rank, share, tensor, copy, copies)

    def _ways(self, parameter: Parameter) -> tuple[int, int]:
        """Shares of the parameter itself, and expert ranks that have other experts instead."""
        return (self.tp, 1) if parameter.expert is None else (self.etp, self.ep)
