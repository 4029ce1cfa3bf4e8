"""A small base checkpoint and a stream in a directory for publisher tests, and an independent reader of that stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import AnyRecord, decode_record
from dcr_daemon.store.file import FileStore
from support.events import RecordedEvents

Weights = dict[str, Bits]

SPECS = [
    TensorSpec("embed.weight", "BF16", (64, 32)),
    TensorSpec("layer.0.bias", "F32", (16,)),
    TensorSpec("layer.0.weight", "BF16", (48, 32)),
    TensorSpec("layer.1.weight", "BF16", (32, 48)),
    TensorSpec("none", "BF16", (0, 4)),
    TensorSpec("norm.weight", "BF16", (32,)),
    TensorSpec("scale", "F32", ()),
    TensorSpec("table", "I64", (9,)),
    TensorSpec("tiny", "U8", (5,)),
]


def make_weights(layout: Layout, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {s.name: rng.integers(0, 256, s.nbytes, dtype=np.uint8).view(bits_dtype(s.width)) for s in layout}


def step_weights(weights: Weights, seed: int, rate: float = 0.05) -> Weights:
    """A few elements of every tensor move by a little, as after an optimizer step."""
    rng, new = np.random.default_rng(seed), {}
    for name, bits in weights.items():
        moved = bits.copy()
        where = rng.random(bits.size) < rate
        moved[where] += rng.choice(np.array([1, -1, 5]), size=int(where.sum())).astype(bits.dtype)
        new[name] = moved
    return new


class StreamReader:
    """Reads a stream from its bucket alone: ledger, vectors, anchors, chunks. It uses no code of the publisher."""

    def __init__(self, url: str, base: Weights) -> None:
        self.url, self.base = url, base

    def records(self) -> list[AnyRecord]:
        folder = Path(self.url.removeprefix("file://")) / "ledger"
        return [decode_record(path.read_bytes()) for path in sorted(folder.glob("*.json"))]

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.records()]

    def versions(self) -> dict[int, Weights]:
        return asyncio.run(self.read_versions())

    async def read_versions(self) -> dict[int, Weights]:
        """Every version rebuilt from version 0 and the chain; fingerprints and anchors are checked on the way."""
        store = FileStore(Path(self.url.removeprefix("file://")))
        ledger = Ledger(store)
        await ledger.read()
        objects = Objects(store, floor=lambda: 0, patience=0)
        layout = await objects.read_layout(ledger.stream)
        arrays = [self.base[spec.name].copy() for spec in layout]
        assert np.array_equal(fingerprint(layout, arrays), await objects.read_vector(ledger.stream, layout))
        found = {0: {s.name: a.copy() for s, a in zip(layout, arrays, strict=True)}}
        for seal in await ledger.history.between(1):
            parts = await objects.read_parts(seal)
            sums = [await objects.read(part.sums, seal.version, limit=1 << 20) for part in parts]
            before, after = np.array([np.frombuffer(s, dtype="<u8").reshape(2, -1) for s in sums]).sum(0, dtype="u8")
            assert np.array_equal(before, fingerprint(layout, arrays))
            for part in parts:
                for ref in part.chunks:
                    chunk = open_chunk(await objects.read_chunk(ref, seal.version), layout)
                    for i, segment in enumerate(chunk.segments):
                        changes, bits = chunk.changes(i), arrays[segment.tensor]
                        where = segment.box.canonical(changes.positions)
                        bits[where] = changes.resolve(bits[where])
            assert np.array_equal(after, fingerprint(layout, arrays))
            assert np.array_equal(fingerprint(layout, arrays), await objects.read_vector(seal, layout))
            found[seal.version] = {s.name: a.copy() for s, a in zip(layout, arrays, strict=True)}
        for anchor in await ledger.history.anchors():
            await self._check_anchor(objects, layout, anchor, found[anchor.version])
        return found

    async def _check_anchor(self, objects: Objects, layout: Layout, anchor: Any, want: Weights) -> None:
        index = await objects.read_anchor_index(anchor)
        arrays = [np.zeros_like(want[spec.name]) for spec in layout]
        for ref in index.files:
            file = SafetensorsBytes(await objects.read_file(ref, anchor.version), ref.key)
            for tensor, box, bits in read_pieces(file, layout):
                if box is not None:
                    arrays[tensor][box.canonical(np.arange(box.elements, dtype=np.int64))] = bits
        assert all(np.array_equal(a, want[s.name]) for s, a in zip(layout, arrays, strict=True))


def same_weights(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


class PublishWorld:
    """What a publisher under test needs, below `root`: a base checkpoint, a stream in a directory, a state directory.

    `weights` are those of the base, as arrays of bits by tensor name; `events` records what the publisher emits.
    """

    def __init__(self, root: Path, *, layout: Layout | None = None) -> None:
        self.root = root
        self.layout = layout or Layout(SPECS)
        self.weights = make_weights(self.layout)
        self.base, self.state = root / "base", root / "state"
        self.url = f"file://{root / 'bucket'}"
        self.events = RecordedEvents()
        self.write(self.base, self.weights)

    def write(self, out: Path, weights: Weights, *, shard_bytes: int = 1 << 30, layout: Layout | None = None) -> Path:
        extras = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b"{}"}
        write_checkpoint(
            out, layout or self.layout, bits_of=weights.__getitem__, side_files=extras, shard_bytes=shard_bytes
        )
        return out

    def tensors(self, weights: Weights) -> dict[str, Any]:
        """The same as torch tensors."""
        with Checkpoint(self.write(self.root / f"t{len(list(self.root.iterdir()))}", weights)) as checkpoint:
            from safetensors.torch import load_file

            return load_file(checkpoint.files[0].path)

    @property
    def reader(self) -> StreamReader:
        return StreamReader(self.url, self.weights)

    def store(self) -> FileStore:
        return FileStore(self.root / "bucket")
