"""How rank 0 looks for what other ranks have put: for a few of them, each listed by itself, side by side."""

from __future__ import annotations

import asyncio

from dcr_daemon.errors import KeyNotFound
from dcr_daemon.events import discard
from dcr_daemon.publish.group.collect import ObjectCollector
from dcr_daemon.publish.rank import Rank
from dcr_daemon.store.port import Entry


class Bucket:
    """Lists `keys`; none of them can be read, and that takes a while."""

    url = "test://bucket"

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def list(self, prefix):
        for key in self.keys:
            if key.startswith(prefix):
                yield Entry(key, 1)

    async def get(self, key, *, limit):
        await asyncio.sleep(0.01)
        raise KeyNotFound(key)


async def test_a_rank_whose_failure_cannot_be_read_hides_no_progress_of_another():
    async def check() -> None:
        pass

    bucket = Bucket()
    collector = ObjectCollector(
        bucket, Rank(group="g", world=3), "data/1/2/", lag=1.0, lag_began=lambda: None, check=check, emit=discard
    )
    bucket.keys.append("data/1/2/g-1-a.fail.json")
    assert await collector._look([1, 2], ".part.json", {})
    bucket.keys.append("data/1/2/g-2-b-0.dcr")
    assert await collector._look([1, 2], ".part.json", {})
    assert not await collector._look([1, 2], ".part.json", {})
