"""Says when the next anchor is due, by what the chain since the newest one has come to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.disk import write_atomically
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import show_u64, total_of
from dcr_daemon.publish.group.join import Joined
from dcr_daemon.untrusted import decode_json


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


class _Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What the versions from `anchor` (0: the base) up to `version` add up to.

    `bytes`: of their deltas. `after`: the total of the newest one. `broken`: no chain leads over them.
    """

    stream: str
    anchor: int
    version: int
    bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    after: str
    broken: bool = False


_chains = msgspec.json.Decoder(_Chain)


class SinceAnchor:
    """The versions since the newest anchor, as far as the ledger was read.

    They are asked about after every version, so what they add up to is carried along, over restarts too, and no seal is
    read twice.

    Args:
        kept: the file that keeps the sum for the next start. What it says of sealed versions stays right; without it
            their seals are read again.
    """

    def __init__(self, ledger: Ledger, policy: AnchorPolicy, *, dense_bytes: int, kept: Path) -> None:
        self._ledger, self._policy, self._dense_bytes, self._kept = ledger, policy, dense_bytes, kept
        self._chain: _Chain | None = None

    async def due(self, coming: Joined | None = None) -> bool:
        """Whether they ask for another one: by policy, or because no chain leads over them.

        Args:
            coming: what is about to be sealed, to be counted as well.

        A version made from an unverified base says so: its `before` is not the `after` of the version before it.
        """
        chain = await self._read_on()
        versions = chain.version - chain.anchor
        if coming is None:
            return chain.broken or self._policy.due(versions, chain.bytes, self._dense_bytes)
        broken = chain.broken or show_u64(total(coming.before)) != chain.after
        return broken or self._policy.due(versions + 1, chain.bytes + coming.bytes, self._dense_bytes)

    async def _read_on(self) -> _Chain:
        """The sum up to the newest version that was read."""
        ledger, state = self._ledger, self._ledger.state
        stream, anchor = ledger.stream.stream, state.anchor.version if state.anchor else 0
        known = self._chain or self._load()
        if known and (known.stream, known.anchor) == (stream, anchor) and anchor <= known.version <= state.seal.version:
            chain = known
        else:
            after = total_of(await ledger.version_record(anchor))
            chain = _Chain(stream=stream, anchor=anchor, version=anchor, after=after)
        for seal in await ledger.history.between(chain.version + 1):
            chain = msgspec.structs.replace(
                chain,
                version=seal.version,
                bytes=chain.bytes + seal.bytes,
                after=seal.after,
                broken=chain.broken or seal.before != chain.after,
            )
        self._chain = chain
        if chain != known:
            with contextlib.suppress(OSError):  # the next start then reads the seals
                write_atomically(self._kept, msgspec.json.encode(chain), site="chain", durable=False)
        return chain

    def _load(self) -> _Chain | None:
        try:
            return decode_json(_chains, self._kept.read_bytes())
        except (OSError, ValueError):
            return None
