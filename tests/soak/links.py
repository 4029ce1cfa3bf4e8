"""What a soak does to the requests of one daemon, on their way to the bucket and back."""

from __future__ import annotations

import random
import re
from typing import ClassVar

from soak.daemons import Daemon
from soak.faults import Requested
from soak.world import World
from support.stores.faulty_proxy import Fault as Answer
from support.stores.faulty_proxy import Planned


class BadAnswers(Requested):
    """One to a few requests are refused, lost, cut, stalled or starved."""

    name = "bad answers"
    codes: ClassVar[set[int]] = {15}
    kinds: ClassVar[tuple[Answer, ...]] = (
        Answer.RESET_BEFORE, Answer.RESET_AFTER, Answer.TRUNCATE, Answer.UNAVAILABLE, Answer.SLOW_DOWN,
    )  # fmt: skip
    shown = ("request", "times", "answer")

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.kind, self.times = draw.choice(self.kinds), draw.choice((1, 1, 2, 5, 12))
        self.answer = self.kind.name.lower()

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(nth=self.request, times=self.times, fault=self.kind)


class SlowAnswers(BadAnswers):
    """Requests stall, trickle, or vanish, until the round heals."""

    name = "stalled answers"
    kinds = (Answer.STALL, Answer.TRICKLE, Answer.BLACK_HOLE)


class Misread(Requested):
    """An object's bytes come with one other byte; the bucket is sound."""

    name = "misread object"
    places: ClassVar[tuple[str, ...]] = ("/data/", "/anchors/")
    furthest = 8
    shown = ("request", "times")

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.times, self.where = draw.choice((1, 1, 1, 2)), draw.random()

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(matches=self._matches, nth=self.request, times=self.times, edit=self._edit)

    def _matches(self, method: str, path: str) -> bool:
        return method == "GET" and any(place in path for place in self.places)

    def _edit(self, body: bytes) -> bytes:
        at = int(self.where * len(body))
        return body[:at] + bytes([body[at] ^ 0x04]) + body[at + 1 :]


class MisreadRecord(Misread):
    """A record of the ledger comes with one other byte, which may leave it a record; the bucket is sound."""

    name = "misread record"
    furthest = 12
    shown = ("request", "how")

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.how, self.times = draw.choice(("any byte", "its time")), 0

    def plan(self, daemon: Daemon) -> Planned:
        """Most requests for a record find none, so answers are counted."""
        return Planned(matches=self._matches, times=1 << 30, edit=self._edit)

    def _matches(self, method: str, path: str) -> bool:
        return method == "GET" and "/ledger/" in path

    def _edit(self, body: bytes) -> bytes:
        self.times += 1
        if self.times != self.request or not body:
            return body
        self.struck = True
        return other_time(body, self.where) if self.how == "its time" else super()._edit(body)

    async def end(self, world: World) -> None:
        pass


def other_time(body: bytes, where: float) -> bytes:
    """The record with one other digit in the time at which it was written."""
    found = re.search(rb'"at":"[^"]*"', body)
    if not found:
        return body
    digits = [at for at in range(*found.span()) if body[at : at + 1].isdigit()]
    at = digits[int(where * len(digits))]
    return body[:at] + bytes([ord("0") + (body[at] - ord("0") + 1) % 10]) + body[at + 1 :]
