"""Says when the next anchor is due, by what the chain since the newest one has come to."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import show_u64, total_of
from dcr_daemon.publish.group.join import Joined


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """When the next anchor is due: after `every` versions, or when the chain since the last one outweighs `share` of
    a dense checkpoint. None switches either off."""

    every: int | None
    share: float | None

    @property
    def active(self) -> bool:
        return self.every is not None or self.share is not None

    def due(self, versions: int, chain_bytes: int, dense_bytes: int) -> bool:
        """`versions` and `chain_bytes` count from the last anchor (or version 0)."""
        if versions == 0:
            return False
        by_count = self.every is not None and versions >= self.every
        return by_count or (self.share is not None and chain_bytes > self.share * dense_bytes)


class SinceAnchor:
    """The versions since the newest anchor, as far as the ledger was read.

    They are asked about after every version, so what they add up to is carried along, and no seal is read twice.
    """

    def __init__(self, ledger: Ledger, policy: AnchorPolicy, *, dense_bytes: int) -> None:
        self._ledger, self._policy, self._dense_bytes = ledger, policy, dense_bytes
        self._anchor: int | None = None
        self._version = self._bytes = 0
        self._after = ""
        self._broken = False

    async def due(self, coming: Joined | None = None) -> bool:
        """Whether they ask for another one: by policy, or because no chain leads over them.

        Args:
            coming: what is about to be sealed, to be counted as well.

        A version made from an unverified base says so: its `before` is not the `after` of the version before it.
        """
        state, history = self._ledger.state, self._ledger.history
        anchor = state.anchor.version if state.anchor else 0
        if anchor != self._anchor:
            self._anchor = self._version = anchor
            self._bytes, self._broken = 0, False
            self._after = total_of(await self._ledger.version_record(anchor))
        for seal in await history.between(self._version + 1):
            self._broken |= seal.before != self._after
            self._version, self._after = seal.version, seal.after
            self._bytes += seal.bytes
        if coming is None:
            return self._broken or self._policy.due(self._version - anchor, self._bytes, self._dense_bytes)
        broken = self._broken or show_u64(total(coming.before)) != self._after
        return broken or self._policy.due(self._version - anchor + 1, self._bytes + coming.bytes, self._dense_bytes)
