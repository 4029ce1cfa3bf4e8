"""What one call of `publish` is given, on its way into an attempt. `update_steps.diff_update` calls it.

    RankShards     what this rank holds; its projection is agreed on with all ranks, and every block read through it
    TensorTable    whole tensors that exist at once: judged before an attempt opens, then diffed together
    TensorStream   whole tensors that come one by one: each is diffed before the next is asked for

Whole tensors are the identity projection: `Attempt.diff` reads each block of a tensor from the tensor itself. They do
not go through `RankProjection`, which maps and probes the weights first, and needs all of them at once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Open
from dcr_daemon.projection import host
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.projected import AgreedProjection, RankProjection
from dcr_daemon.publish.inputs.sources import Source, TensorSource, synchronize_sources
from dcr_daemon.publish.inputs.tensors import as_shards, as_stream, as_table
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.inputs.validator import UpdateValidator
from dcr_daemon.publish.version.attempt import Attempt

T = TypeVar("T")

EXPORT = names.ROUNDS + 1  #: the round in which every rank says that it can take part in the exports


class OnLoop(Protocol):
    """Awaiting what it returns runs the work on the coordinator's loop, and gives its result or raises its error."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Awaitable[T]: ...


class AgreedUpdate(Protocol):
    """The weights of one call, with which all ranks can go on."""

    async def diff(self, coordinator: Coordinator, record: Open, *, attempt: Attempt, on_loop: OnLoop) -> None:
        """Diff everything; the weights are not needed afterwards.

        Raises:
            Incompatible: what comes one by one does not fit the layout.
        """
        ...


class UpdateInput(Protocol):
    """The weights of one call. `check`, then `agree`, then `diff` of what that returns: each once, where the weights
    may be looked at."""

    @property
    def rounded(self) -> Mapping[tuple[str, str], int]:
        """Tensors of which values are rounded, by (given dtype, canonical dtype); known after `diff`."""
        ...

    @property
    def followed(self) -> Mapping[str, str]:
        """Tensors that are not among the weights, each with the one that it follows; known after `diff`."""
        ...

    def check(self) -> None:
        """Find what is wrong before an attempt opens.

        Raises:
            Incompatible: the weights do not fit the layout; everything is listed.
        """
        ...

    async def agree(self, coordinator: Coordinator, record: Open, *, on_loop: OnLoop) -> AgreedUpdate:
        """With an open attempt, but before the baseline is touched: make sure that all ranks can go on."""
        ...


class RankShards:
    """What this rank holds of the weights.

    Args:
        projection: this rank's, kept from call to call.
        weights: a module, a table, pairs, or a list of modules.
    """

    def __init__(self, projection: RankProjection, weights: Any) -> None:
        self.rounded: Mapping[tuple[str, str], int] = {}  # the projection casts, and reports it when it is agreed on
        self._projection, self._weights = projection, weights

    @property
    def followed(self) -> Mapping[str, str]:
        return self._projection.agreed.follows if self._projection.agreed else {}

    def check(self) -> None:
        """Nothing: a fault of one rank must be told to all, for which an attempt has to be open."""

    async def agree(self, coordinator: Coordinator, record: Open, *, on_loop: OnLoop) -> AgreedShards:
        projection, weights = self._projection, as_shards(self._weights)
        agreed = projection.agreed
        # All ranks must take the same branch, and whether a version of this group was sealed is the only fact that all
        # ranks know to be equal.
        if agreed and coordinator.context.committed:
            agreed.bind(weights)
        else:
            first = projection.declare(weights, record)
            verdict = await on_loop(coordinator.agree(record, 1, declared=first.declaration, judge=projection.judge))
            second = first.probe(verdict)
            verdict = await on_loop(coordinator.agree(record, 2, declared=second.declaration, judge=projection.judge))
            agreed = projection.agreed = second.accept_verdict(verdict)
            await on_loop(_hold(coordinator, agreed))
        host.synchronize_devices(agreed.devices())
        return AgreedShards(agreed)


class AgreedShards:
    """What this rank publishes of its weights, as all ranks agreed."""

    def __init__(self, agreed: AgreedProjection) -> None:
        self._agreed = agreed

    async def diff(self, coordinator: Coordinator, record: Open, *, attempt: Attempt, on_loop: OnLoop) -> None:
        agreed = self._agreed
        if not coordinator.context.committed:
            agreed.check_followers(coordinator.context.baseline.read_box)
        await on_loop(attempt.diff_blocks(agreed.blocks()))
        if agreed.exports:
            await on_loop(coordinator.agree(record, EXPORT, declared=names.READY, judge=lambda declared: names.READY))
        with contextlib.closing(agreed.residual()) as residual:
            for index, tensor, overwrite in residual:
                source = TensorSource(coordinator.layout[index].name, tensor)
                synchronize_sources([source])
                await on_loop(attempt.diff([(index, source)], Codec.OVERWRITE if overwrite else None))


async def _hold(coordinator: Coordinator, agreed: AgreedProjection) -> None:
    coordinator.context.hold(agreed.owned)


def whole_tensors(
    weights: Any, layout: Layout, *, subject: str, ignore: Sequence[str], tied: TiedTensors
) -> TensorTable | TensorStream:
    """The input of a process that has all weights under the checkpoint's names.

    Args:
        weights: a module, a mapping, or an iterable of pairs.
        subject, ignore, tied: of `UpdateValidator`.
    """
    validator = UpdateValidator(subject, layout, ignore=ignore, tied=tied)
    table = as_table(weights, layout)
    if table is None:
        return TensorStream(as_stream(weights, layout), validator)
    return TensorTable(table, layout, validator=validator)


class _WholeTensors:
    """Whole tensors: there is nothing to agree on."""

    def __init__(self, validator: UpdateValidator) -> None:
        self._validator = validator
        self.rounded: Counter[tuple[str, str]] = validator.rounded
        self.followed: Mapping[str, str] = validator.followed

    async def agree(self, coordinator: Coordinator, record: Open, *, on_loop: OnLoop) -> Self:
        return self


class TensorTable(_WholeTensors):
    """Whole tensors, all of which exist."""

    def __init__(self, table: list[TensorSource], layout: Layout, *, validator: UpdateValidator) -> None:
        super().__init__(validator)
        self._table, self._layout = table, layout
        self._inputs: dict[int, TensorSource] = {}

    def check(self) -> None:
        synchronize_sources(self._table)
        inputs = self._inputs = dict(self._validator.accept_all(self._table))

        def read(index: int, start: int, count: int) -> Bits:
            return inputs[index].read(start, count, self._layout[index].dtype)

        def aliases(extra: Source, index: int) -> bool:
            return index in inputs and isinstance(extra, TensorSource) and extra.aliases(inputs[index])

        followers = self._validator.followers(read)
        inputs |= {index: inputs[source.index] for index, source in followers}
        self._validator.finish(read, aliases)

    async def diff(self, coordinator: Coordinator, record: Open, *, attempt: Attempt, on_loop: OnLoop) -> None:
        await on_loop(attempt.diff((index, source.contiguous()) for index, source in self._inputs.items()))


class TensorStream(_WholeTensors):
    """Whole tensors that come one by one: the producer may reuse the memory of one for the next."""

    def __init__(self, stream: Iterator[TensorSource], validator: UpdateValidator) -> None:
        super().__init__(validator)
        self._stream = stream

    def check(self) -> None:
        """Nothing: no tensor is there yet."""

    async def diff(self, coordinator: Coordinator, record: Open, *, attempt: Attempt, on_loop: OnLoop) -> None:
        for source in self._stream:
            inputs = self._validator.accept_all([source])
            self._validator.check()
            if inputs:
                synchronize_sources([source])
                await on_loop(attempt.diff((index, source.contiguous()) for index, source in inputs))
        if followers := self._validator.followers(coordinator.read):
            await on_loop(attempt.diff(followers))
        self._validator.finish(coordinator.read)
