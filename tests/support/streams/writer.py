"""A publisher for tests that sit below the real one: it writes versions to a stream step by step, or wrongly."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.checkpoint.pieces import piece_metadata, plan_files
from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.codec.encode import EncodedChunk
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Abort, Anchor, AnchorIndex, ChunkRef, ObjectRef, Open, Part, Seal
from dcr_daemon.store import open_store, put_if_absent
from dcr_daemon.store.port import Store
from support.streams.versions import EXTRAS, Versions
from support.tensors.partitions import Cut, pieces_of


class StreamWriter:
    """Writes `versions` to the stream at `url`."""

    def __init__(self, url: str, versions: Versions, store: Store) -> None:
        self.url, self.versions, self.store = url, versions, store
        self.ledger = Ledger(store)
        self.attempt = 0

    @property
    def home(self) -> Path:
        """The stream's directory, for tests that spoil objects."""
        return Path(self.url.removeprefix("file://"))

    async def create(self) -> None:
        await self.ledger.create_stream(self.versions.layout, self.versions.vector(0))
        self.versions.stream = self.ledger.stream.stream
        await self.ledger.claim("test")

    async def open(self, version: int) -> int:
        """Open an attempt at `version`; its id."""
        record = await self.ledger.append(
            lambda header: Open(**header.fields, version=version, base=version - 1, group="g", call=version)
        )
        self.attempt = record.seq
        return record.seq

    def chunks(self, version: int) -> list[EncodedChunk]:
        return self.versions.encode(version, self.attempt)

    async def put(self, version: int, chunk: EncodedChunk, *, edit: Callable[[bytes], bytes] = bytes) -> ChunkRef:
        """Upload a chunk; `edit` spoils its bytes on the way, behind the publisher's back."""
        key = names.chunk(version, self.attempt, "g", 0, "a0", chunk.id.n)
        await put_if_absent(self.store, key, edit(chunk.data))
        return ChunkRef(key, len(chunk.data), records.digest(chunk.data), len(chunk.segments), chunk.changed)

    async def seal(self, version: int, chunks: list[ChunkRef], *, step: int | None = None) -> Seal:
        """Seal the open attempt with these chunks."""
        changed, size = sum(chunk.changed for chunk in chunks), sum(chunk.size for chunk in chunks)
        before = self.versions.vector(version - 1).astype("<u8").tobytes()
        sums = await self._object(names.sums(version, self.attempt, "g", 0, "a0"), before)
        part = Part(
            stream=self.versions.stream,
            group="g",
            call=version,
            attempt=self.attempt,
            base=version - 1,
            version=version,
            rank=0,
            nonce="a0",
            chunks=chunks,
            sums=sums,
            changed=changed,
            bytes=size,
        )
        place = await self._object(names.part(version, self.attempt, "g", 0, "a0"), records.encode(part))
        vector = self.versions.vector(version).astype("<u8").tobytes()
        fingerprint = await self._object(names.vector(version, self.attempt), vector)
        total = [records.show_u64(int(self.versions.vector(v).sum(dtype="u8"))) for v in (version - 1, version)]
        return await self.ledger.append(
            lambda header: Seal(
                **header.fields,
                version=version,
                base=version - 1,
                attempt=self.attempt,
                parts=[place],
                fingerprint=fingerprint,
                before=total[0],
                after=total[1],
                previous=header.state.seal.seq,
                changed=changed,
                elements=sum(spec.elements for spec in self.versions.layout),
                bytes=size,
                dense_bytes=self.versions.layout.nbytes,
                step=100 + version if step is None else step,
            )
        )

    async def publish(self, *versions: int) -> None:
        """Open, upload and seal each version."""
        for version in versions:
            await self.open(version)
            await self.seal(version, [await self.put(version, chunk) for chunk in self.chunks(version)])

    async def anchor_of_ranks(self, version: int, cut: Cut, *, files: int = 3) -> Anchor:
        """As `anchor`, with every tensor in the pieces that `cut` makes of it, dealt out over so many files."""
        layout = self.versions.layout
        pieces = pieces_of(layout, cut, self.versions.values[version])
        prefix, made = names.anchor(version, self.ledger.tip.seq), []
        for n in range(files):
            path = self.versions.home / f"anchor-{version}-of-rank-{n}.safetensors"
            path.unlink(missing_ok=True)
            mine = pieces[n::files]
            specs = [TensorSpec(entry, layout[layout.index(place[0])].dtype, bits.shape) for entry, place, bits in mine]
            places = {"format": "pt"} | {entry: json.dumps(place) for entry, place, _ in mine}
            write_safetensors(
                path, [(spec, bits) for spec, (_, _, bits) in zip(specs, mine, strict=True)], metadata=places
            )
            made.append(await self._object(f"{prefix}model-{n}.safetensors", path.read_bytes()))
        return await self._seal_anchor(version, prefix, made)

    async def abort(self, version: int) -> None:
        await self.ledger.append(
            lambda header: Abort(**header.fields, attempt=self.attempt, version=version, reason="test")
        )

    async def anchor(
        self, version: int, *, limit: int = 30_000, content: int | None = None, without: str = ""
    ) -> Anchor:
        """Upload a complete version as an anchor; wrongly, the tensors of another one, or all but one."""
        layout, values = self.versions.layout, self.versions.values[version if content is None else content]
        prefix, files = names.anchor(version, self.ledger.tip.seq), []
        for n, planned in enumerate(plan_files(layout, limit)):
            pieces = [piece for piece in planned if layout[piece.tensor].name != without]
            path = self.versions.home / f"anchor-{version}-{n}.safetensors"
            path.unlink(missing_ok=True)
            items = [(p.entry, values[layout[p.tensor].name][p.run]) for p in pieces]
            write_safetensors(path, items, metadata=piece_metadata(layout, pieces))
            files.append(await self._object(f"{prefix}model-{n}.safetensors", path.read_bytes()))
        return await self._seal_anchor(version, prefix, files)

    async def _seal_anchor(self, version: int, prefix: str, files: list[ObjectRef]) -> Anchor:
        extras = [await self._object(prefix + name, body) for name, body in EXTRAS.items()]
        index = AnchorIndex(stream=self.versions.stream, version=version, files=files, extras=extras)
        place = await self._object(f"{prefix}index.json", records.encode(index))
        total = records.show_u64(int(self.versions.vector(version).sum(dtype="u8")))
        size = sum(ref.size for ref in [*files, *extras])
        return await self.ledger.append(
            lambda header: Anchor(**header.fields, version=version, index=place, total=total, bytes=size)
        )

    async def _object(self, key: str, body: bytes) -> ObjectRef:
        await put_if_absent(self.store, key, body)
        return ObjectRef(key, len(body), records.digest(body))


@pytest.fixture
def make_stream(tmp_path: Path, make_versions: Callable[..., Versions]) -> Callable[..., Awaitable[StreamWriter]]:
    """An async factory of streams in a directory of their own, with `count` versions to publish (none published)."""
    number = iter(range(100))

    async def make(count: int = 0, **options: object) -> StreamWriter:
        url = f"file://{tmp_path}/stream-{next(number)}"
        writer = StreamWriter(url, make_versions(count, **options), await open_store(url))
        await writer.create()
        return writer

    return make
