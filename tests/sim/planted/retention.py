"""Bugs of retention and anchors (must L5)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from sim.planted.bug import Put, bug

from dcr_daemon.ledger import fold
from dcr_daemon.ledger.records import Floor
from dcr_daemon.ledger.retention import collector, plan
from dcr_daemon.ledger.retention.collector import Collected, Collector
from dcr_daemon.ledger.retention.plan import FloorPlan, Plan, Why
from dcr_daemon.publish.group import anchors


@bug("L5 (elsewhere: a slow reader lost what it was reading)", "late_replica", "operator")
def deleted_before_the_floor(put: Put) -> None:
    """Objects go before the record that says so."""
    right_raise = Collector.raise_floor

    async def raise_floor(self: Collector, plan: Plan) -> None:
        await self._store.delete([item.key for item in plan.items])
        await right_raise(self, plan)

    put(Collector, "raise_floor", raise_floor)


@bug("L5 (elsewhere: early deltas were pruned and nothing led past them)", "late_replica", "operator")
def floor_above_the_anchor(put: Put) -> None:
    """The floor is the oldest version to keep, whether or not an anchor leads there."""
    right = fold.judge

    def judge(state: Any, record: Any) -> str:
        return "" if isinstance(record, Floor) else right(state, record)

    def plan_floor(oldest: int, floor: int, _: Any) -> FloorPlan:
        made = retention_plan(oldest, floor, _)
        return replace(made, floor=max(oldest, floor))

    from dcr_daemon.ledger import ledger as ledgers

    retention_plan = plan.plan_floor
    put(fold, "judge", judge)
    put(ledgers, "judge", judge)
    put(collector, "plan_floor", plan_floor)


@bug("L5", "late_replica", "operator", "take_over")
def whatever_is_not_sealed_is_rubbish(put: Put) -> None:
    """Every attempt without a seal is collected, the one under way too."""
    right = plan._Judge._data

    def data(self: Any, entry: Any, version: int, attempt: int) -> Any:
        if self._facts.sealed.get(version) != attempt:
            return plan.Item(entry.key, entry.size, Why.UNSEALED, version, attempt)
        return right(self, entry, version, attempt)

    put(plan._Judge, "_data", data)


@bug("L5", "rolled_back_bucket")
def unknown_attempts_are_rubbish(put: Put) -> None:
    """Data of attempts above the tail that was read are collected."""
    right = plan._Judge._data

    def data(self: Any, entry: Any, version: int, attempt: int) -> Any:
        if attempt > self._facts.tip:
            return plan.Item(entry.key, entry.size, Why.UNSEALED, version, attempt)
        return right(self, entry, version, attempt)

    put(plan._Judge, "_data", data)


@bug("L5 (elsewhere: a full copy was not whole)", "late_replica", "publisher_dies", "operator")
def anchor_record_before_its_files(put: Put) -> None:
    """The anchor is recorded, and its last file is put afterwards."""
    right = anchors.put_if_absent
    late: list[Any] = []

    async def put_if_absent(store: Any, key: str, body: Any, **options: Any) -> None:
        if key.startswith("anchors/") and key.endswith(".safetensors"):
            late.append((store, key, body))
            return
        await right(store, key, body, **options)

    put(anchors, "put_if_absent", put_if_absent)


@bug("L5", "take_over", "fenced_collector")
def fenced_collector_goes_on(put: Put) -> None:
    """Whoever planned deletes what it planned, without a look at the ledger and its floor."""

    async def delete(self: Collector, plan: Plan, **_: Any) -> Collected:
        await self._store.delete([item.key for item in plan.items])
        return Collected(plan.floor.floor, len(plan.items), 0)

    async def raise_floor(self: Collector, plan: Plan) -> None:
        from dcr_daemon.errors import DcrError

        with contextlib.suppress(DcrError):
            await right(self, plan)

    right = Collector.raise_floor
    put(Collector, "delete", delete)
    put(Collector, "raise_floor", raise_floor)
