"""Bugs of subscribers and of the directory engine (musts E2, E8, F1, F3, L6)."""

from __future__ import annotations

from typing import Any

from sim.planted.bug import Put, bug

from dcr_daemon.checkpoint import safetensors
from dcr_daemon.engine.directory import checkout, transactions
from dcr_daemon.engine.directory.checkout import Checkout
from dcr_daemon.subscribe import driver
from dcr_daemon.subscribe.driver import Driver
from dcr_daemon.subscribe.fetch.stage import Stage


@bug("E2 (elsewhere: routable before it was current)", "engine_dies", "late_replica")
def ready_at_any_version(put: Put) -> None:
    """An engine that is proved at some version serves it, and catches up afterwards."""
    right = Driver._step

    async def step(self: Driver) -> None:
        if self.version is not None and not self._told_to_serve:
            await self._serve()
        await right(self)

    put(Driver, "_step", step)


@bug("F3", "engine_dies", "first", "anything")
def oldest_of_equal_versions_is_meant(put: Put) -> None:
    """Weights that several versions share are taken for the oldest of them."""
    right = driver.locate

    async def locate(ledger: Any, live: Any, *, objects: Any, layout: Any, **options: Any) -> Any:
        from dcr_daemon.subscribe.locate import matches

        for version in range(ledger.state.floor, options["highest"] + 1):
            if await matches(await ledger.version_record(version), live, objects=objects, layout=layout):
                return version
        return await right(ledger, live, objects=objects, layout=layout, **options)

    put(driver, "locate", locate)


@bug("F1 (elsewhere: what was missing was skipped with a warning)", "first", "anything")
def a_chunk_is_left_out(put: Put) -> None:
    """A replica stages what it happens to have, and nobody compares that with the seal."""
    from dcr_daemon.engine import deltas
    from dcr_daemon.vllm_plugin.core import verify_sums

    right = Stage._stage_delta

    async def hop(self: Stage, *arguments: Any) -> Any:
        made = await right(self, *arguments)
        return type(made)(**{**_fields(made), "chunks": made.chunks[:-1]})

    put(Stage, "_stage_delta", hop)
    put(deltas, "check_chain", lambda *_, **__: None)
    put(transactions, "check_chain", lambda *_, **__: None)
    put(verify_sums, "verify_composed", lambda *_: 0)
    put(verify_sums, "compare_written", lambda *_: "")


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@bug("E8", "power_cut", "subscriber_dies")
def directory_without_a_mark(put: Put) -> None:
    """Files are changed in place, and nothing tells a loader meanwhile."""
    right = Checkout._replace

    def replace(self: Checkout, path: Any, value: Any) -> None:
        if not isinstance(value, checkout.Dirty):
            right(self, path, value)

    put(Checkout, "_replace", replace)
    put(Checkout, "_hide_config", lambda self: None)


@bug("E8 (elsewhere: an untouched tensor was old after a host crash)", "power_cut")
def data_is_not_synced(put: Put) -> None:
    """The version is written before what it speaks of is durable."""
    put(safetensors, "sync_file", lambda *_, **__: None)


@bug("E8", "power_cut", "subscriber_dies")
def version_before_its_data(put: Put) -> None:
    """The directory says the new version first, and is then changed."""
    right = Checkout.redo

    def redo(self: Checkout, found: Any, layout: Any) -> None:
        head = found.head
        self._replace(
            self._marker,
            checkout.Marker(
                stream=head.stream, layout=head.layout, version=head.version, label=head.label, vector=head.vector,
                txn=head.txn,
            ),
        )  # fmt: skip
        self._show_config()
        self._dirty.unlink(missing_ok=True)
        right(self, found, layout)

    put(Checkout, "redo", redo)
    put(Checkout, "_hide_config", lambda self: None)
