"""Prometheus metrics, computed from events; readiness and free disk space are looked up when they are scraped.

Prefix `dcr_`, base units (bytes, seconds, ratio), `_total` on counters. Labels have few values: never a version, a
key or a tensor. docs/OPERATIONS.md lists the metrics; a test compares that list with this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

import dcr_daemon
from dcr_daemon import events as e
from dcr_daemon import runtime
from dcr_daemon.observe.health import Health, Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


#: Label values that exist from the start, by what the role does: an alert on an increase must see the first one too.
MUSTS = ("F1", "L2", "L6", "L7", "P4", "P7")
_OUTCOMES = {"publisher": ("sealed", "aborted"), "subscriber": ("committed", "rolled_back")}
_CAUSES = ("misfit", "other_shape", "outdated")
_OBSTACLES = ("blocked", "poisoned", "unsupported")

# There is otherwise one more series for each counter and histogram, with the time at which this process made it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class _Known:
    """A gauge that is absent until its first value: an unknown version is not version 0."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._gauge, self._registry = Gauge(name, text, registry=None), registry
        self._set = False

    def set(self, value: float) -> None:
        self._gauge.set(value)
        if not self._set:
            self._registry.register(self._gauge)
            self._set = True

    def clear(self) -> None:
        """It is not known any more."""
        if self._set:
            self._registry.unregister(self._gauge)
            self._set = False


class Metrics:
    """An `Emit` with its own registry, so that one process may have several.

    Args:
        health: readiness, and the role, which decides which series there are from the start; None for those of both.
        info: labels of `dcr_info`: stream and replica.
        disks: directories of which the free space is told, by what they are for.
    """

    def __init__(
        self,
        health: Health | None = None,
        *,
        info: Mapping[str, str] | None = None,
        disks: Mapping[str, Path] | None = None,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dcr_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"dcr_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"dcr_{name}", text, labels, buckets=_SECONDS, registry=registry)

        gauge("build_info", "Always 1; the version is in the label.", "version").labels(dcr_daemon.__version__).set(1)
        role = health.role if health else None
        if health:
            labels = {"stream": "", "replica": "", **(info or {}), "role": health.role}
            gauge("info", "Always 1; what this process does is in the labels.", *labels).labels(**labels).set(1)
            gauge("ready", "1 while /readyz answers 200, else 0.").set_function(lambda: float(health.ready))
        free = gauge("disk_free_bytes", "Bytes that this process may still write, by directory.", "directory")
        for name, path in (disks or {}).items():
            free.labels(name).set_function(partial(_free, path))

        def known(name: str, text: str) -> _Known:
            return _Known(f"dcr_{name}", text, registry)

        self.head = known("head_version", "Newest sealed policy version that the bucket shows.")
        self.served = known("served_version", "Policy version that the engine serves.")
        self.lag = known("lag_versions", "head_version minus served_version.")
        self.read_at = known("ledger_read_timestamp_seconds", "When the end of the ledger was last seen, in Unix time.")
        self.density = known("delta_density_ratio", "Changed elements of the newest version over all elements.")
        self.stages = histogram("stage_seconds", "Duration of the stages of an update or a refit.", "stage")
        self.pause = histogram("pause_seconds", "Time in which the engine generated nothing because of a refit.")
        self.phases = histogram(
            "pause_phase_seconds", "Parts of dcr_pause_seconds, as far as the engine says.", "phase"
        )
        self.spent = histogram("prepare_phase_seconds", "Parts of the stage prepare on the slowest rank.", "phase")
        self.bytes = counter("chunk_bytes_total", "Bytes of chunks moved, by direction.", "direction")
        self.chunks = counter("chunks_total", "Chunks moved, by direction.", "direction")
        self.versions = counter(
            "versions_total", "Versions by outcome: sealed, aborted, committed, rolled_back.", "outcome"
        )
        self.skipped = counter(
            "checkpoints_skipped_total", "Complete watched checkpoints that are not published, by cause.", "cause"
        )
        self.anchors = counter("anchors_total", "Anchors written.")
        self.collected = counter("collected_total", "Objects deleted by retention.")
        self.collected_bytes = counter("collected_bytes_total", "Bytes of objects deleted by retention.")
        self.repairs = counter("repairs_total", "Engines repaired from an anchor or by adoption.")
        self.fenced = counter("fenced_total", "Times somebody newer took over.")
        self.alarms = counter("alarms_total", "Contained violations of the protocol, by must.", "must")
        self.blocked = gauge("blocked", "1 while something stands before the newest version, by kind.", "kind")
        self.scrubs = counter("scrubs_total", "Passes over live weights by outcome: clean, damaged.", "outcome")
        self.scrubbed = known("scrub_last_timestamp_seconds", "When the last clean pass ended, in Unix time.")
        self.scrub_bytes = counter("scrub_bytes_total", "Bytes summed by clean passes.")
        self.requests = counter("store_requests_total", "Requests to the store.", "operation", "outcome")
        self.request_seconds = histogram("store_request_seconds", "Duration of store requests.", "operation")
        self.request_bytes = counter("store_bytes_total", "Bytes moved by store requests.", "operation")
        self.refusals = counter(
            "refusals_total", "Refusals by the engine: of a version, of an anchor, or of the whole stream.", "what"
        )
        self._declare(role)
        self._head, self._served = 0, -1
        self._unread = False  #: the end of the ledger is out of sight, and with it the lag
        self._obstacle: int | None = None
        self._handlers: dict[type[e.Event], Callable[[Any], None]] = {
            e.Sealed: self._sealed,
            e.LedgerRead: lambda event: self._versions(head=event.head),
            e.LedgerPolled: self._polled,
            e.LedgerUnread: self._lost_sight,
            e.Refused: lambda event: self.refusals.labels(event.subject).inc(),
            e.LedgerDoubted: lambda event: self._versions(head=event.head),
            e.SealSeen: lambda event: self._versions(head=event.version),
            e.Serving: lambda event: self._serving(event.version),
            e.Blocked: self._obstructed,
            e.Unsupported: self._unsupported,
            e.ScrubEnded: self._scrub_ended,
            e.Damaged: lambda event: self.scrubs.labels("damaged").inc(),
            e.Aborted: lambda event: self.versions.labels("aborted").inc(),
            e.CheckpointSkipped: lambda event: self.skipped.labels(event.cause).inc(),
            e.ShardTaken: lambda event: self.stages.labels("shard").observe(event.seconds),
            e.ChunkPut: lambda event: self._chunk("put", event.bytes),
            e.ChunkFetched: lambda event: self._chunk("fetched", event.bytes),
            e.AnchorPut: self._anchored,
            e.Collected: self._collected,
            e.Attached: self._attached,
            e.Prepared: self._prepared,
            e.Committed: self._committed,
            e.RolledBack: lambda event: self.versions.labels("rolled_back").inc(),
            e.Repaired: self._repaired,
            e.FencedOut: lambda event: self.fenced.inc(),
            e.Alarm: lambda event: self.alarms.labels(event.must).inc(),
            e.StoreRequest: self._requested,
        }

    def _declare(self, role: Role | None) -> None:
        """Make the series that are 0 until something happens."""
        for must in MUSTS:
            self.alarms.labels(must)
        for of, outcomes in _OUTCOMES.items():
            for outcome in outcomes if role in (None, of) else ():
                self.versions.labels(outcome)
        if role != "subscriber":
            for cause in _CAUSES:
                self.skipped.labels(cause)
        if role != "publisher":
            for kind in _OBSTACLES:
                self.blocked.labels(kind)
            for outcome in ("clean", "damaged"):
                self.scrubs.labels(outcome)
            for what in ("version", "anchor", "stream"):
                self.refusals.labels(what)
        for direction in ({"publisher": "put", "subscriber": "fetched"}[role],) if role else ("put", "fetched"):
            self.bytes.labels(direction)
            self.chunks.labels(direction)

    def __call__(self, event: e.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler:
            handler(event)

    def exposition(self) -> bytes:
        """All metrics in the text format of `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _versions(self, *, head: int | None = None, served: int | None = None) -> None:
        self._head = max(self._head, head or 0, served or 0)
        self._served = self._served if served is None else served
        self.head.set(self._head)
        if self._served >= 0:  # a publisher has no served version and no lag
            self.served.set(self._served)
            if not self._unread:
                self.lag.set(self._head - self._served)

    def _polled(self, event: e.LedgerPolled) -> None:
        self._unread = False
        self.read_at.set(runtime.now().timestamp())
        self._versions(head=event.head)

    def _lost_sight(self, event: e.LedgerUnread) -> None:
        self._unread = True
        self.lag.clear()

    def _unsupported(self, event: e.Unsupported) -> None:
        self.refusals.labels("stream").inc()
        self.blocked.labels("unsupported").set(1)

    def _chunk(self, direction: str, size: int) -> None:
        self.bytes.labels(direction).inc(size)
        self.chunks.labels(direction).inc()

    def _sealed(self, event: e.Sealed) -> None:
        self._head = max(self._head, event.version)
        self.head.set(self._head)  # a publisher has no served version and no lag
        self.versions.labels("sealed").inc()
        self.stages.labels("update").observe(event.seconds)
        if event.elements:
            self.density.set(event.changed / event.elements)

    def _anchored(self, event: e.AnchorPut) -> None:
        self.anchors.inc()
        self.stages.labels("anchor").observe(event.seconds)

    def _collected(self, event: e.Collected) -> None:
        self.collected.inc(event.objects)
        self.collected_bytes.inc(event.bytes)

    def _attached(self, event: e.Attached) -> None:
        self.stages.labels("attach").observe(event.seconds)
        self.blocked.labels("unsupported").set(0)
        if event.version is not None:
            self._versions(served=event.version)

    def _prepared(self, event: e.Prepared) -> None:
        self.stages.labels("prepare").observe(event.seconds)
        for phase, seconds in event.spent.items():
            self.spent.labels(phase).observe(seconds)

    def _committed(self, event: e.Committed) -> None:
        self._versions(served=event.version)
        self.versions.labels("committed").inc()
        self.pause.observe(event.pause_seconds)
        for phase, seconds in event.phases.items():
            self.phases.labels(phase).observe(seconds)
        self.stages.labels("refit").observe(event.seconds)

    def _repaired(self, event: e.Repaired) -> None:
        self.repairs.inc()
        self._versions(served=event.version)

    def _serving(self, version: int) -> None:
        self._versions(served=version)
        if self._obstacle is None or self._obstacle <= version:
            for kind in ("blocked", "poisoned"):
                self.blocked.labels(kind).set(0)

    def _obstructed(self, event: e.Blocked) -> None:
        self._obstacle = event.version
        for kind in ("blocked", "poisoned"):
            self.blocked.labels(kind).set(kind == ("poisoned" if event.poisoned else "blocked"))

    def _scrub_ended(self, event: e.ScrubEnded) -> None:
        self.scrubs.labels("clean").inc()
        self.scrub_bytes.inc(event.bytes)
        self.scrubbed.set(runtime.now().timestamp())

    def _requested(self, event: e.StoreRequest) -> None:
        self.requests.labels(event.operation, event.outcome).inc()
        self.request_seconds.labels(event.operation).observe(event.seconds)
        self.request_bytes.labels(event.operation).inc(event.bytes)


def _free(path: Path) -> float:
    """Free bytes of the file system of `path`, or of the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return float("nan")
    return float(found.f_bavail * found.f_frsize)
