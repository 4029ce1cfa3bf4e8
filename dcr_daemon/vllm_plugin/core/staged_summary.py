"""Reads what a transaction's staged files say, beside the workers' prepare and without stopping EngineCore's loop.

Input: the hops of a transaction. Output: a future of one `StagedSummary` per hop, which `verify_sums` compares with
what the workers summed. Only headers and tables are unpacked here; each worker decodes the segments that it holds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.deltas import StagedSummary, read_summary
from dcr_daemon.engine.port import VersionDelta


class SummaryReader:
    """One thread of the lowest priority, started when first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dcr-tables", initializer=_lower_priority)

    def start(self, hops: Sequence[VersionDelta], layout: Layout) -> Future[list[StagedSummary]]:
        """Read all hops. The future raises `Corrupt` or `EngineRefused`, naming the file."""
        return self._pool.submit(read_summaries, hops, layout)


def read_summaries(hops: Sequence[VersionDelta], layout: Layout) -> list[StagedSummary]:
    return [read_summary(hop, layout) for hop in hops]


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
