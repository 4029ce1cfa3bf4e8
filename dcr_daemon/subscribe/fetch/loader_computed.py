"""Keeps the canonical bytes of the tensors that an engine's loader computes with, which live memory does not contain.

An engine that casts a bias or stores `-exp(A_log)` holds no bits of the checkpoint there. So the subscriber keeps the
bytes of these tensors in its state directory, in a file `loaded-<version>.safetensors` each time they change, and gives
the engine that file together with the delta. It promises: a file has the sums of its version's vector; files are
written whole, and an older one is deleted only after the engine has committed a newer version; a lost one is rebuilt
from the base or an anchor and the chain, for these tensors alone. An engine without such tensors costs nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits, Vector, sum_at, sum_run
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, SafetensorsFile, pack_safetensors
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.engine.port import TensorClass, VersionDelta
from dcr_daemon.errors import Corrupt, DcrError, Incompatible
from dcr_daemon.events import Emit, Waiting
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import ChunkRef, Part, Seal
from dcr_daemon.ledger.routes import Routes
from dcr_daemon.subscribe.fetch.files import write_staged
from dcr_daemon.subscribe.fetch.stage import AHEAD, CONCURRENCY
from dcr_daemon.task_limiter import Work, run_in_order
from dcr_daemon.wording import shorten

FILES_LIMIT = 64 << 20  #: bytes of files written for one transaction, from which on it takes no more versions

Values = dict[int, Bits]  #: whole tensors by layout index, as unsigned integers


class LoaderComputed:
    """The loader-computed tensors of one engine (`TensorClass.LOADER_COMPUTED`).

    Args:
        home: the subscriber's state directory.
        base: the checkpoint of version 0, if the operator gave it.
    """

    def __init__(
        self,
        home: Path,
        *,
        ledger: Ledger,
        objects: Objects,
        layout: Layout,
        base: Path | None,
        workers: runtime.Workers,
        emit: Emit,
    ) -> None:
        self._home, self._base = home, base
        self._ledger, self._objects, self._layout = ledger, objects, layout
        self._workers, self._emit = workers, emit
        self.tensors: tuple[int, ...] = ()

    def set_classes(self, classes: Sequence[TensorClass]) -> None:
        """An attach has told which tensors these are."""
        self.tensors = tuple(i for i, kind in enumerate(classes) if kind is TensorClass.LOADER_COMPUTED)

    async def file_of(self, version: int) -> str:
        """The path of a file of these tensors as `version` has them; empty if there are none.

        Raises:
            NoRoute, BelowFloor: no file is kept, and no route leads to the version.
            Incompatible: the base given is not version 0.
            Corrupt, ResourceExhausted, StoreUnavailable: while they are rebuilt.
        """
        if not self.tensors:
            return ""
        vector = await self._vector(version)
        for _, path in self._files():
            kept = await self._workers.run(self._read, path)
            if kept is not None and not await self._workers.run(self._wrong, kept, vector):
                return str(path)
        values = await self._rebuild(version, vector)
        return await self._write(version, values)

    async def attach_files(self, hops: list[VersionDelta], base: int) -> list[VersionDelta]:
        """The staged deltas, each with the file that belongs to it; fewer of them, at least one, if `FILES_LIMIT` ends
        it.

        Raises:
            Corrupt: a chunk does not change what is kept here into what its version says.
            As `file_of`, for the version they start from.
        """
        if not self.tensors:
            return hops
        path, written, ready = "", 0, list[VersionDelta]()
        values = await self._workers.run(self._read, Path(await self.file_of(base)))
        if values is None:
            raise Corrupt(f"what is kept of version {base} cannot be read", hint="check this disk")
        for hop in hops:
            if await self._workers.run(self._change, values, hop.chunks, (hop.attempt, hop.base, hop.version)):
                after = np.fromfile(hop.after, dtype="<u8").astype(np.uint64)
                if wrong := await self._workers.run(self._wrong, values, after):
                    raise Corrupt(f"the chunks of version {hop.version} do not lead to its vector: {wrong}")
                path = await self._write(hop.version, values)
                written += sum(bits.nbytes for bits in values.values())
            ready.append(msgspec.structs.replace(hop, loaded=path))
            if written >= FILES_LIMIT:
                break
        return ready

    async def keep_from(self, version: int, files: Sequence[str]) -> None:
        """Keep these tensors from the files of an anchor that the engine has loaded."""
        if self.tensors:
            await self._write(version, await self._workers.run(self._gather, map(SafetensorsFile, map(Path, files))))

    def delete_older(self, version: int) -> None:
        """The engine has committed `version`: keep only the newest file up to it."""
        files = self._files()
        kept = next((path for found, path in files if found <= version), None)
        for _, path in files:
            if path != kept:
                path.unlink(missing_ok=True)

    # What is kept.

    def _files(self) -> list[tuple[int, Path]]:
        """Newest version first."""
        found = ((path.stem.removeprefix("loaded-"), path) for path in self._home.glob("loaded-*.safetensors"))
        return sorted(((int(name), path) for name, path in found if name.isdecimal()), reverse=True)

    def _read(self, path: Path) -> Values | None:
        """The tensors in a file; None if it is damaged, or of other tensors (those of another engine)."""
        try:
            return self._gather([SafetensorsFile(path)])
        except DcrError:
            return None

    async def _write(self, version: int, values: Values) -> str:
        path = self._home / f"loaded-{version}.safetensors"
        body = pack_safetensors([(self._layout[tensor], bits) for tensor, bits in values.items()])
        await self._workers.run(write_staged, path, bytes(body))
        runtime.failpoint("subscribe.loaded.kept")
        return str(path)

    def _wrong(self, values: Values, vector: Vector) -> str:
        """The first tensor that does not have its sum; empty if all have."""
        for tensor, bits in values.items():
            if sum_run(bits, int(self._layout.keys[tensor])) != int(vector[tensor]):
                return self._layout[tensor].name
        return ""

    def _gather(self, files: Iterable[SafetensorsFile | SafetensorsBytes]) -> Values:
        """These tensors from an anchor's files, whole or in pieces. Raises `Corrupt` if one is not complete."""
        values = {t: np.zeros(self._layout[t].elements, bits_dtype(self._layout[t].width)) for t in self.tensors}
        left = {tensor: bits.size for tensor, bits in values.items()}
        for file in files:
            for tensor, box, bits in read_pieces(file, self._layout):
                if tensor in values and box is not None:
                    box.view(values[tensor])[...] = bits.reshape(box.shape)
                    left[tensor] -= box.elements
            if isinstance(file, SafetensorsFile):
                file.close()
            if not any(left.values()):
                return values
        names = [self._layout[tensor].name for tensor, missing in left.items() if missing]
        raise Corrupt(f"the files given do not hold all of {shorten(names)}")

    # Rebuilding what is lost.

    async def _rebuild(self, version: int, vector: Vector) -> Values:
        """From the newest version kept here, the base, or an anchor, whichever route is cheapest, along the chain."""
        have, kept = await self._start(version)
        routes, failed = Routes(self._ledger.history, version, base=have), list[Corrupt]()
        async for route in routes:
            self._emit(
                Waiting(
                    what=f"the rebuild of {len(self.tensors)} loader-computed tensors of version {version} from {route}"
                )
            )
            try:
                values = kept if route.anchor is None else await self._from_anchor(route.anchor)
                assert values is not None, "a route starts from an anchor or from what is kept"
                await self._apply_chain(values, route.hops, routes)
                if wrong := await self._workers.run(self._wrong, values, vector):
                    raise Corrupt(
                        f"version {version} does not have the sums of its seal: {wrong}", hint="run `dcr verify`"
                    )
                return values
            except Corrupt as error:
                failed.append(error)
        raise failed[0]

    async def _start(self, version: int) -> tuple[int | None, Values | None]:
        """A version to start from, and its bytes: kept here, or the base; None and None if there is neither."""
        for found, path in self._files():
            kept = await self._workers.run(self._read, path) if found <= version else None
            if kept is not None and not await self._workers.run(self._wrong, kept, await self._vector(found)):
                return found, kept
        if self._base is None:
            return None, None
        values = await self._workers.run(self._from_base, self._base)
        if wrong := await self._workers.run(self._wrong, values, await self._vector(0)):
            raise Incompatible(
                f"{self._base} is not version 0 of {self._ledger.store.url}: {wrong} differs",
                hint="give --base the checkpoint that the stream was created from",
            )
        return 0, values

    def _from_base(self, base: Path) -> Values:
        values = Values()
        with Checkpoint(base) as checkpoint:
            for tensor in self.tensors:
                spec = self._layout[tensor]
                if checkpoint.file(spec.name).spec(spec.name) != spec:
                    raise Incompatible(f"{base} holds another {spec.name} than the stream", hint="give another --base")
                values[tensor] = checkpoint.bits(spec.name).reshape(-1).copy()
        return values

    async def _from_anchor(self, version: int) -> Values:
        """These tensors from the files of an anchor, of which one is in memory at a time."""
        anchor = await self._ledger.history.anchor(version)
        pieces: list[SafetensorsBytes] = []
        for ref in (await self._objects.read_anchor_index(anchor)).files:
            body = await self._objects.read_file(ref, version)
            pieces.append(await self._workers.run(self._part_of, body, ref.key))
        return await self._workers.run(self._gather, pieces)

    def _part_of(self, body: bytes, name: str) -> SafetensorsBytes:
        """The entries of a file that belong to these tensors, as a small file of its own."""
        file = SafetensorsBytes(body, name)
        mine = [
            (entry, file.bits(entry.name))
            for entry, (tensor, _, _) in zip(file.specs, read_pieces(file, self._layout), strict=True)
            if tensor in self.tensors
        ]
        return SafetensorsBytes(pack_safetensors(mine, file.metadata), name)

    async def _apply_chain(self, values: Values, hops: Sequence[int], routes: Routes) -> None:
        seals = await self._ledger.history.between(hops[0], hops[-1]) if hops else []
        async with aclosing(run_in_order(self._chunks(seals, routes), CONCURRENCY)) as chunks:
            async for seal, chunk in chunks:
                await self._workers.run(self._change, values, [chunk], (seal.attempt, seal.base, seal.version))

    async def _chunks(self, seals: Sequence[Seal], routes: Routes) -> AsyncGenerator[Work[tuple[Seal, bytes]]]:
        """Reads of the chunks of these versions, in order. The parts of versions are read ahead."""

        async def read_parts(seal: Seal) -> tuple[Seal, list[Part]]:
            with _blames(seal, routes):
                return seal, await self._objects.read_parts(seal)

        async def read_chunk(seal: Seal, chunk: ChunkRef) -> tuple[Seal, bytes]:
            with _blames(seal, routes):
                return seal, await self._objects.read_chunk(chunk, seal.version)

        async with aclosing(run_in_order((partial(read_parts, seal) for seal in seals), AHEAD)) as versions:
            async for seal, parts in versions:
                for part in parts:
                    for chunk in part.chunks:
                        yield partial(read_chunk, seal, chunk)

    def _change(self, values: Values, chunks: Iterable[bytes | str], of: tuple[int, int, int]) -> bool:
        """Apply the changes of these tensors in some chunks (bytes or paths) in place; returns whether there are any.

        Raises:
            Corrupt: a chunk belongs to another attempt, or does not lead from `values` to the sums that it says.
        """
        changed = False
        for one in chunks:
            chunk = open_chunk(one if isinstance(one, bytes) else Path(one).read_bytes(), self._layout)
            if (chunk.id.attempt, chunk.id.base, chunk.id.version) != of:
                raise Corrupt(f"a chunk of {chunk.id} was found among those of version {of[2]}")
            for n in np.flatnonzero(np.isin(chunk.table.tensor, list(values))).tolist():
                changed = True
                changes = chunk.changes(n)
                bits, key = values[changes.segment.tensor], int(self._layout.keys[changes.segment.tensor])
                at = changes.segment.box.canonical(changes.positions)
                new = changes.resolve(bits[at])
                if (sum_at(bits[at], at, key=key), sum_at(new, at, key=key)) != (
                    changes.segment.before,
                    changes.segment.after,
                ):
                    name = self._layout[changes.segment.tensor].name
                    raise Corrupt(f"version {of[2]} does not change {name} from what is kept here, or not as it says")
                bits[at] = new
        return changed

    async def _vector(self, version: int) -> Vector:
        return await self._objects.read_vector(await self._ledger.version_record(version), self._layout)


@contextmanager
def _blames(seal: Seal, routes: Routes) -> Iterator[None]:
    """Reads only objects of one version: what is damaged belongs to its delta."""
    try:
        yield
    except Corrupt:
        routes.damaged_deltas.add(seal.version)
        raise
