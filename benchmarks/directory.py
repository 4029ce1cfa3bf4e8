"""The directory engine on this machine: changing files in place with a journal, against writing them anew.

    python benchmarks/directory.py [--gigabytes 1] [--changed 0.01] [--versions 3] [--directory DIR] [--json]

A generated bf16 model in shards of 128 MiB gets a few versions in which `--changed` of the elements, spread evenly over
all of it, have other bits. Each version is applied twice: by `DirectoryEngine` (a redo journal, then writes in place,
must E8), and by a prototype that writes every changed shard anew while the old ones are still in use, and then renames.
Both decode and check the same chunks. Times are wall seconds, each also as a ratio to copying the model with fsync in
the same run; medians over the versions. `marked` is the time in which no loader may open the directory. `written` is
what the kernel counts for this process (pages made dirty), `space` what lies on the disk beside the model meanwhile.
docs/DECISIONS.md has the figures that led to the decision.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import encode_header
from dcr_daemon.codec.chunk import SEGMENT_BYTES, ChunkId
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.codec.warm import compile_kernels
from dcr_daemon.disk import sync_directory, write_atomically
from dcr_daemon.engine.deltas import check_chain
from dcr_daemon.engine.directory.compose import compose, open_hop
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import StreamFacts, Transaction, VersionDelta
from dcr_daemon.engine.staged import read_vector

STREAM = "be9c" * 8
SHARD_BYTES = 128 << 20
TENSOR_ELEMENTS = 16 << 20
BLOCK = 16 << 20


class Versions:
    """The generated model, its bits at the newest version, and each version's delta as staged files below `home`."""

    def __init__(self, home: Path, size: int, changed: float) -> None:
        self.home, self._changed, self._random = home, changed, np.random.default_rng(1)
        count = max(1, size // (2 * TENSOR_ELEMENTS))
        self.layout = Layout(TensorSpec(f"layers.{n:04d}.weight", "BF16", (TENSOR_ELEMENTS,)) for n in range(count))
        self.bits: list[Bits] = [self._random.integers(0, 1 << 16, TENSOR_ELEMENTS, np.uint16) for _ in self.layout]
        self.version = 0
        (home / "layout.json").write_bytes(self.layout.encoded)
        self._write_vector()

    @property
    def facts(self) -> StreamFacts:
        return StreamFacts(stream=STREAM, layout=str(self.home / "layout.json"), layout_digest=self.layout.digest)

    def vector(self, version: int) -> str:
        return str(self.home / f"vector-{version}")

    def _write_vector(self) -> None:
        body = fingerprint(self.layout, self.bits).astype("<u8").tobytes()
        Path(self.vector(self.version)).write_bytes(body)

    def step(self) -> VersionDelta:
        """Change some elements everywhere; the delta, staged."""
        base, self.version = self.version, self.version + 1
        encoder, paths = ChunkEncoder(self.layout), list[str]()

        def finish() -> None:
            identity = ChunkId(
                stream=STREAM,
                attempt=self.version,
                base=base,
                version=self.version,
                group="g",
                rank=0,
                nonce="a0",
                n=len(paths),
            )
            path = self.home / f"{self.version}-{len(paths)}.dcr"
            path.write_bytes(encoder.finish(identity).data)
            paths.append(str(path))

        for tensor, bits in enumerate(self.bits):
            for start in range(0, bits.size, SEGMENT_BYTES // 2):
                old = bits[start : start + SEGMENT_BYTES // 2]
                new = old ^ (self._random.random(old.size, np.float32) < self._changed).astype(np.uint16)
                encoder.add(tensor, Box.flat(start, old.size), old, new)  # this puts the new bits into `old`
                if encoder.full:
                    finish()
        if encoder.pending:
            finish()
        self._write_vector()
        return VersionDelta(
            version=self.version,
            base=base,
            attempt=self.version,
            chunks=paths,
            before=self.vector(base),
            after=self.vector(self.version),
        )


class Rewriter:
    """The prototype: shards with changes are written anew beside the old ones; a swap only renames them.

    What a real engine would also need (owner, lock, installing after a kill, a check of the marker at attach) costs no
    time here and is left out.
    """

    def __init__(self, path: Path, versions: Versions) -> None:
        self._path, self._layout, self._incoming = path, versions.layout, path / ".dcr" / "incoming"

    def prepare(self, delta: VersionDelta) -> None:
        opened = open_hop(self._layout, STREAM, hop=delta)
        check_chain(self._layout, [opened.summary], read_vector(delta.before, self._layout))
        self._incoming.mkdir(parents=True)
        with Checkpoint(self._path) as checkpoint:
            changes = {change.tensor: change for change in compose(self._layout, [opened], live=checkpoint.bits)}
            for file in checkpoint.files:
                with (self._incoming / file.path.name).open("wb", buffering=0) as out:
                    out.write(encode_header(file.specs, file.metadata))
                    for spec in file.specs:
                        bits = file.bits(spec.name).copy()
                        if change := changes.get(self._layout.index(spec.name)):
                            bits[change.positions] = change.new
                        out.write(bits.data)
                    os.fsync(out.fileno())
        sync_directory(self._incoming, site="benchmark")

    def swap(self) -> None:
        mark = self._path / ".dcr" / "dirty"
        write_atomically(mark, b"{}", site="benchmark")
        for path in sorted(self._incoming.iterdir()):
            path.rename(self._path / path.name)
        sync_directory(self._path, site="benchmark")
        mark.unlink()
        sync_directory(mark.parent, site="benchmark")
        self._incoming.rmdir()


def written() -> int:
    """Bytes that this process has made dirty in the page cache so far, as Linux counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def size_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def copy_seconds(source: Path, target: Path) -> float:
    """Copy a directory's files, each with fsync."""
    began = time.monotonic()
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file, (target / path.name).open("wb", buffering=0) as out:
            while block := file.read(BLOCK):
                out.write(block)
            os.fsync(out.fileno())
    return time.monotonic() - began


def measure(prepare: Callable[[], object], swap: Callable[[], object], path: Path) -> dict[str, float]:
    """One version: seconds of both steps, bytes written, and bytes on the disk between them beside the model."""
    before, model = written(), size_below(path)
    began = time.monotonic()
    prepare()
    prepared, space = time.monotonic(), size_below(path) - model
    swap()
    return {
        "prepare_s": prepared - began,
        "marked_s": time.monotonic() - prepared,
        "written": written() - before,
        "space": space,
    }


def run(home: Path, size: int, changed: float, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Measurements by way ("copy", "in place", "anew"), version by version."""
    versions = Versions(home, size, changed)
    compile_kernels({2})
    place, anew = home / "place", home / "anew"
    names = {spec.name: bits for spec, bits in zip(versions.layout, versions.bits, strict=True)}
    for path in (place, anew):
        write_checkpoint(
            path, versions.layout, bits_of=names.__getitem__, side_files={"config.json": b"{}"}, shard_bytes=SHARD_BYTES
        )
    engine, rewriter, loop = DirectoryEngine(place), Rewriter(anew, versions), asyncio.new_event_loop()
    loop.run_until_complete(engine.attach(versions.facts))
    loop.run_until_complete(engine.prove(0, versions.vector(0), "0"))
    for number in range(rounds + 1):
        delta = versions.step()
        txn = Transaction(id=f"t{number}", hops=[delta], label=str(delta.version))
        ways: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("copy", lambda: {"prepare_s": copy_seconds(anew, home / "copy")}),
            (
                "in place",
                lambda txn=txn: measure(
                    lambda: loop.run_until_complete(engine.prepare(txn)),
                    lambda: loop.run_until_complete(engine.swap(txn.id)),
                    place,
                ),
            ),
            ("anew", lambda delta=delta: measure(lambda: rewriter.prepare(delta), rewriter.swap, anew)),
        ]
        first = number % len(ways)  # a disk's own cache favours whoever comes first
        result = {way: run_way() for way, run_way in (*ways[first:], *ways[:first])}
        shutil.rmtree(home / "copy")
        with Checkpoint(place) as one, Checkpoint(anew) as other:
            for spec, bits in zip(versions.layout, versions.bits, strict=True):
                if not np.array_equal(one.bits(spec.name), bits) or not np.array_equal(other.bits(spec.name), bits):
                    raise SystemExit(f"{spec.name} is not version {versions.version}")
        for path in delta.chunks:
            Path(path).unlink()
        if number:  # the first one compiles and fills caches
            yield from result.items()
    loop.run_until_complete(engine.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default: 1)")
    parser.add_argument("--changed", type=float, default=0.01, help="share of changed elements (default: 0.01)")
    parser.add_argument("--versions", type=int, default=3, help="versions measured (default: 3)")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    size = int(args.gigabytes * 1e9)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as home:
        for way, numbers in run(Path(home), size, args.changed, args.versions):
            found.setdefault(way, []).append(numbers)
    medians = {way: {key: statistics.median(n[key] for n in rows) for key in rows[0]} for way, rows in found.items()}
    copy = medians["copy"]["prepare_s"]
    model = size // (2 * TENSOR_ELEMENTS) * 2 * TENSOR_ELEMENTS
    result = {
        way: {
            "prepare_s": numbers["prepare_s"],
            "prepare_to_copy": numbers["prepare_s"] / copy,
            "marked_s": numbers["marked_s"],
            "marked_to_copy": numbers["marked_s"] / copy,
            "written_to_model": numbers["written"] / model,
            "space_to_model": numbers["space"] / model,
        }
        for way, numbers in medians.items()
        if way != "copy"
    }
    if args.json:
        print(json.dumps({"copy_s": copy, "model_bytes": model, **result}))
        return
    print(f"model of {model / 1e9:.2f} GB, {100 * args.changed:g} % changed; a copy with fsync takes {copy:.2f} s")
    print(f"{'':18}{'in place':>12}{'anew':>12}")
    for key in result["anew"]:
        print(f"{key:18}{result['in place'][key]:12.3f}{result['anew'][key]:12.3f}")


if __name__ == "__main__":
    main()
