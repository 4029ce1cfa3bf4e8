"""What a stream that several ranks wrote must be, judged from the bucket alone and from what the weights were."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Part, Seal
from dcr_daemon.store import open_store
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.materialize import materialize

Weights = Mapping[str, Bits]


@dataclass(frozen=True)
class Told:
    """One version: its record, its parts, and what each part says of its rank's share.

    `sums`: the vectors before and after over all that each rank owns, [ranks, 2, tensors]. `changes`: per part,
    canonical elements by tensor (layout index), one array per segment.
    """

    seal: Seal
    parts: list[Part]
    sums: npt.NDArray[np.uint64]
    changes: list[dict[int, list[npt.NDArray[np.int64]]]]

    @property
    def step(self) -> int | None:
        return self.seal.step


def weights_of(path: Path) -> dict[str, Bits]:
    """The bits of a checkpoint, flat."""
    with Checkpoint(path) as found:
        return {spec.name: np.array(found.bits(spec.name)).reshape(-1) for spec in found.layout}


def layout_of(path: Path) -> Layout:
    with Checkpoint(path) as found:
        return found.layout


async def check_stream(url: str, out: Path, expected: Mapping[int, Weights], like: Layout | None = None) -> list[Told]:
    """Every version is bit for bit what is expected, each element sent by one rank; `verify` finds nothing.

    Args:
        out: where versions are materialised, and removed.
        expected: weights by version, of all versions but 0.
        like: the layout that each version has; without it, all tensors are BF16.
    """
    store = await open_store(url)
    try:
        report = await verify(store)
        assert report.ok, report.damages
        ledger = Ledger(store)
        await ledger.read()
        seals = await ledger.history.between(1)
        assert [seal.version for seal in seals] == sorted(expected)
        for version in expected:
            await _check_version(store, version, out, expected[version], like)
        return await _check_shares(store, ledger, seals)
    finally:
        await store.close()


async def _check_version(store: Store, version: int, out: Path, expected: Weights, like: Layout | None) -> None:
    await materialize(store, version=version, out=out)
    layout, built = layout_of(out), weights_of(out)
    shutil.rmtree(out)
    assert built.keys() == expected.keys(), f"version {version}: {built.keys() ^ expected.keys()}"
    assert like is None or layout.digest == like.digest
    assert like or [spec.dtype for spec in layout] == ["BF16"] * len(layout)
    wrong = [name for name, bits in expected.items() if not np.array_equal(built[name], bits)]
    assert not wrong, f"version {version} differs from the export in {wrong}"


async def _check_shares(store: Store, ledger: Ledger, seals: list[Seal]) -> list[Told]:
    """No rank sends what another owns, and their sums are those of the version before: nobody's share is missing."""
    objects = Objects(store, floor=lambda: 0, patience=0)
    layout = await objects.read_layout(ledger.stream)
    vector = await objects.read_vector(ledger.stream, layout)
    made = []
    for seal in seals:
        told = await _told(objects, layout, seal)
        assert [part.rank for part in told.parts] == list(range(len(told.parts)))
        assert len({(part.group, part.call) for part in told.parts}) == 1, "parts of several groups in one version"
        before, after = np.sum(told.sums, axis=0, dtype=np.uint64)
        assert np.array_equal(before, vector), f"version {seal.version}: the ranks do not own the version before"
        sent = {tensor for changes in told.changes for tensor in changes}
        for tensor in sent:
            elements = np.concatenate([one for changes in told.changes for one in changes.get(tensor, [])])
            assert np.unique(elements).size == elements.size, f"{layout[tensor].name} was sent twice"
        vector = await objects.read_vector(seal, layout)
        assert np.array_equal(after, vector), f"version {seal.version}: the ranks do not own the version"
        made.append(told)
    return made


async def _told(objects: Objects, layout: Layout, seal: Seal) -> Told:
    parts = await objects.read_parts(seal)
    sums, changes = [], []
    for part in parts:
        body = await objects.read(part.sums, seal.version, limit=16 * len(layout))
        sums.append(np.frombuffer(body, "<u8").reshape(2, len(layout)).astype(np.uint64))
        of_part: dict[int, list[npt.NDArray[np.int64]]] = {}
        for ref in part.chunks:
            assert ref.key.startswith(names.attempt(seal.version, seal.attempt))
            chunk = open_chunk(await objects.read_chunk(ref, seal.version), layout)
            for n, segment in enumerate(chunk.segments):
                of_part.setdefault(segment.tensor, []).append(segment.box.canonical(chunk.changes(n).positions))
        changes.append(of_part)
    return Told(seal, parts, np.array(sums), changes)


def changed_elements(before: Weights, after: Weights) -> int:
    return sum(int(np.count_nonzero(before[name] != bits)) for name, bits in after.items())
