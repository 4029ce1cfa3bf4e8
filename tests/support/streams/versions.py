"""A small model that changes from version to version, and its deltas on disk: what several rooms test with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits, Vector, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk
from dcr_daemon.engine.port import StreamFacts, Transaction, VersionDelta

EXTRAS = {"config.json": b'{"model_type": "toy"}', "tokenizer.json": b"{}"}
SPECS = [
    TensorSpec("embed.weight", "BF16", (257, 64)),
    TensorSpec("head.weight", "F32", (64, 33)),
    TensorSpec("layers.0.gate", "F64", (17,)),
    TensorSpec("layers.0.mlp", "BF16", (64, 190)),
    TensorSpec("layers.0.norm", "F32", (64,)),
    TensorSpec("layers.0.scale", "BF16", ()),
    TensorSpec("layers.1.experts", "U8", (8, 40, 33)),
    TensorSpec("layers.1.none", "BF16", (0, 4)),
]


def _flat(layout: Layout, tensor: int) -> list[Box]:
    elements = layout[tensor].elements
    return [Box.flat(start, min(4096, elements - start)) for start in range(0, elements, 4096)]


class Versions:
    """A model whose version v has the bits `values[v]`. Everything written goes below `home`."""

    stream = "5ea1" * 8

    def __init__(self, home: Path, seed: int = 0, layout: Layout | None = None) -> None:
        self.home = home
        self.layout = layout or Layout(SPECS)
        self._random = np.random.default_rng(seed)
        self.cuts: dict[int, Callable[[Layout, int], list[Box]]] = {}  #: by version, of its writer; whole tensors else
        self.values = [{spec.name: self._draw(spec) for spec in self.layout}]

    def _draw(self, spec: TensorSpec) -> Bits:
        return self._random.integers(0, 256, spec.nbytes, dtype=np.uint8).view(f"<u{spec.width}").copy()

    def step(self, rate: float = 0.03) -> int:
        """A new version in which about `rate` of the elements have other bits."""
        fresh = {name: bits.copy() for name, bits in self.values[-1].items()}
        for bits in fresh.values():
            at = np.flatnonzero(self._random.random(bits.size) < rate)
            bits[at] ^= self._random.integers(1, 200, at.size).astype(bits.dtype)
        return self.put(fresh)

    def put(self, values: dict[str, Bits]) -> int:
        """A new version with exactly these bits."""
        self.values.append(values)
        return len(self.values) - 1

    def vector(self, version: int) -> Vector:
        return fingerprint(self.layout, (self.values[version][spec.name] for spec in self.layout))

    def encode(self, version: int, attempt: int | None = None, *, target: int = 3000) -> list[EncodedChunk]:
        """The delta to `version`, in several small chunks."""
        encoder, chunks = ChunkEncoder(self.layout, codec=Codec.AUTO, target=target), list[EncodedChunk]()

        def finish() -> None:
            identity = ChunkId(
                stream=self.stream,
                attempt=version if attempt is None else attempt,
                base=version - 1,
                version=version,
                group="g",
                rank=0,
                nonce="a0",
                n=len(chunks),
            )
            chunks.append(encoder.finish(identity))

        for tensor, spec in enumerate(self.layout):
            for box in self.cuts.get(version, _flat)(self.layout, tensor):
                at = box.canonical(np.arange(box.elements, dtype=np.int64))
                encoder.add(tensor, box, self.values[version - 1][spec.name][at], self.values[version][spec.name][at])
                if encoder.full:
                    finish()
        if encoder.pending:
            finish()
        return chunks

    def vector_file(self, version: int) -> str:
        path = self.home / f"vector-{version}.bin"
        path.write_bytes(self.vector(version).astype("<u8").tobytes())
        return str(path)

    def hop(self, version: int, *, edit: Callable[[bytes], bytes] = bytes) -> VersionDelta:
        """The delta to `version`, staged; `edit` spoils the bytes of its first chunk."""
        paths = []
        for n, chunk in enumerate(self.encode(version)):
            path = self.home / f"{version}-{n}.dcr"
            path.write_bytes(chunk.data if n else edit(chunk.data))
            paths.append(str(path))
        before, after = self.vector_file(version - 1), self.vector_file(version)
        return VersionDelta(
            version=version, base=version - 1, attempt=version, chunks=paths, before=before, after=after
        )

    def transaction(self, *versions: int, name: str = "") -> Transaction:
        label = f"v{versions[-1]}"
        return Transaction(id=name or f"to-{versions[-1]}", hops=[self.hop(v) for v in versions], label=label)

    def facts(self) -> StreamFacts:
        path = self.home / "layout.json"
        path.write_bytes(self.layout.encoded)
        return StreamFacts(stream=self.stream, layout=str(path), layout_digest=self.layout.digest)

    def save(self, out: Path, version: int = 0, *, shard_bytes: int = 1 << 30) -> Path:
        """A plain checkpoint of `version`."""
        write_checkpoint(
            out, self.layout, bits_of=self.values[version].__getitem__, side_files=EXTRAS, shard_bytes=shard_bytes
        )
        return out

    def version_of(self, path: Path) -> int | None:
        """Which version the directory holds, bit for bit; the newest of equal ones."""
        with Checkpoint(path) as found:
            assert found.layout == self.layout
            for version, values in reversed(list(enumerate(self.values))):
                if all(np.array_equal(found.bits(name), bits) for name, bits in values.items()):
                    return version
        return None


@pytest.fixture
def make_versions(tmp_path: Path) -> Callable[..., Versions]:
    """A `Versions` per call, each below its own directory; `count` versions after version 0."""
    number = itertools.count()

    def make(count: int = 0, *, rate: float = 0.03, seed: int = 0, layout: Layout | None = None) -> Versions:
        home = tmp_path / f"versions-{next(number)}"
        home.mkdir()
        versions = Versions(home, seed, layout)
        for _ in range(count):
            versions.step(rate)
        return versions

    return make
