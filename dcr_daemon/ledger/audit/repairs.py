"""Says what can still be done about each damage, once all are known. For `verify` alone; pure.

A version is built from its anchor, or by the delta from the version before. A delta needs its chunks and the vectors of
both its versions, an anchor needs its files and the vector of its version: so a missing vector makes two deltas and an
anchor unusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Anchor

SPARE = "harmless: no reader needs it"


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One damage. `repair` says what can be done; `rebuildable` whether the content still exists elsewhere."""

    key: str
    version: int | None
    what: str
    rebuildable: bool = False
    repair: str = ""


class Repairs:
    """Advice about `damages` of a stream at `head`; `anchors` are the newest of each version."""

    def __init__(self, damages: Sequence[Damage], anchors: Iterable[Anchor], *, floor: int, head: int) -> None:
        self._floor, self._head = floor, head
        self._anchored = {names.record(anchor.seq): anchor.version for anchor in anchors}
        vectors = {d.version for d in damages if d.version is not None and _is_vector(d)}
        hurt = vectors | {d.version for d in damages if self._is_anchors(d) and not _is_spare(d)}
        self._whole = sorted(version for version in self._anchored.values() if version not in hurt)
        broken = {
            d.version
            for d in damages
            if d.version is not None and not d.repair and not self._is_anchors(d) and not _is_spare(d)
        }
        self._broken = broken | {version + 1 for version in vectors}

    def advise(self, damage: Damage) -> Damage:
        """The damage with what can be done about it."""
        if damage.repair or damage.version is None:
            return damage
        rebuildable, repair = damage.rebuildable, ""
        if _is_spare(damage):
            rebuildable, repair = True, SPARE
        elif self._is_anchors(damage):
            rebuildable, repair = self._of_anchor(damage.version)
        else:
            repair = "its content follows from the version before and the chunks; without it, " * rebuildable
            repair += self._of_delta(damage.version, _is_vector(damage))
        return msgspec.structs.replace(damage, rebuildable=rebuildable, repair=repair)

    def _of_anchor(self, version: int) -> tuple[bool, str]:
        """Whether the version can be built without this anchor, and how."""
        start = self._start(version)
        if start is not None:
            return True, f"`dcr materialize --version {version}` still builds it, from the anchor of version {start}"
        lost = f"lost; replicas {self._past(version + 1)}"
        if self._floor or any(hop <= version for hop in self._broken):
            return False, lost
        return (
            False,
            f"`dcr materialize --version {version} --base DIR` builds it from the base checkpoint; else {lost}",
        )

    def _of_delta(self, version: int, vector: bool) -> str:
        """What the loss of a delta, or of a vector, means."""
        end = version
        while end <= self._head and self._start(end) is None:
            end += 1
        lost = f"version {version}" if end == version + 1 else f"versions {version} to {end - 1}"
        what = (
            f"{lost} cannot be built any more" if end > version else f"nothing is lost, version {version} has an anchor"
        )
        return f"{what}; replicas below version {version + vector} {self._past(end)}"

    def _past(self, version: int) -> str:
        """How replicas reach `version` or a later one."""
        past = next((anchor for anchor in self._whole if anchor >= version), None)
        if past is not None:
            return f"go by the anchor of version {past}"
        return "wait until the publisher writes a later anchor: restarted with --anchor-every 1 it does so at once"

    def _start(self, version: int) -> int | None:
        """The newest whole anchor at or below `version`, if the deltas after it lead there."""
        start = max((anchor for anchor in self._whole if anchor <= version), default=None)
        return None if start is None or any(start < hop <= version for hop in self._broken) else start

    def _is_anchors(self, damage: Damage) -> bool:
        return damage.key.startswith("anchors/") or damage.key in self._anchored


def _is_vector(damage: Damage) -> bool:
    return damage.key.startswith("data/") and damage.key.endswith("/fingerprint.bin")


def _is_spare(damage: Damage) -> bool:
    return damage.key.endswith((".sums", "/contents")) or damage.repair == SPARE
