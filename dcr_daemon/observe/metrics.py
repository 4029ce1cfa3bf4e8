"""Prometheus metrics, computed from events only.

Prefix `dcr_`, base units (bytes, seconds, ratio), `_total` on counters. Labels have few values: never a version, a
key or a tensor. docs/OPERATIONS.md lists the metrics; a test compares that list with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

import dcr_daemon
from dcr_daemon import events as e
from dcr_daemon import runtime

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


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


class Metrics:
    """An `Emit` with its own registry, so that one process may have several."""

    def __init__(self) -> None:
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

        def known(name: str, text: str) -> _Known:
            return _Known(f"dcr_{name}", text, registry)

        self.head = known("head_version", "Newest sealed policy version that the bucket shows.")
        self.served = known("served_version", "Policy version that the engine serves.")
        self.lag = known("lag_versions", "head_version minus served_version.")
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
        self._head, self._served = 0, -1
        self._obstacle: int | None = None
        self._handlers: dict[type[e.Event], Callable[[Any], None]] = {
            e.Sealed: self._sealed,
            e.LedgerRead: lambda event: self._versions(head=event.head),
            e.LedgerDoubted: lambda event: self._versions(head=event.head),
            e.SealSeen: lambda event: self._versions(head=event.version),
            e.Serving: lambda event: self._serving(event.version),
            e.Blocked: self._obstructed,
            e.Unsupported: lambda event: self.blocked.labels("unsupported").set(1),
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
            self.lag.set(self._head - self._served)

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
