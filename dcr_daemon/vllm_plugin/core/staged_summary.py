"""What a transaction's staged files promise: the segment tables of its chunks and the vectors of its versions.

Read beside the workers' prepare, on one low-priority thread of EngineCore, so that its loop goes on. Only headers and
tables are unpacked here; the workers decode the segments they hold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.format import Table
from dcr_daemon.engine.port import VersionDelta
from dcr_daemon.engine.staged import read_staged, read_vector
from dcr_daemon.errors import Corrupt
from dcr_daemon.vllm_plugin.core.verify_sums import HopTable


@dataclass(frozen=True, slots=True, eq=False)
class StagedSummary:
    """Of each hop in order: its table, and its version's vectors before and after."""

    tables: list[HopTable]
    before: list[Vector]
    after: list[Vector]


def read_summary(hops: Sequence[VersionDelta], layout: Layout) -> StagedSummary:
    """All tables and vectors of a transaction. Raises `Corrupt` or `EngineRefused`, naming the file."""
    tables = [read_table(hop, layout) for hop in hops]
    return StagedSummary(
        tables, [read_vector(hop.before, layout) for hop in hops], [read_vector(hop.after, layout) for hop in hops]
    )


def read_table(hop: VersionDelta, layout: Layout) -> HopTable:
    """The segments of one version, in the order in which workers number them."""
    tables = [_table(path, hop, layout) for path in hop.chunks]

    def column(name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(getattr(table, name) for table in tables)]).astype(dtype)

    return HopTable(
        version=hop.version,
        tensor=column("tensor", np.int64),
        changed=column("changed", np.int64),
        before=column("before", np.uint64),
        after=column("after", np.uint64),
    )


def _table(path: str, hop: VersionDelta, layout: Layout) -> Table:
    chunk = open_chunk(read_staged(path), layout)
    found = (chunk.id.version, chunk.id.base, chunk.id.attempt)
    if found != (hop.version, hop.base, hop.attempt):
        raise Corrupt(
            f"{path} is of version {found[0]} on {found[1]}, attempt {found[2]}; "
            f"wanted {hop.version} on {hop.base}, attempt {hop.attempt}",
            hint="stage the version again",
        )
    return chunk.table


class SummaryReader:
    """One thread, made when first needed, of the lowest priority."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dcr-tables", initializer=_step_back)

    def start(self, hops: Sequence[VersionDelta], layout: Layout) -> Future[StagedSummary]:
        return self._pool.submit(read_summary, hops, layout)


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
