"""The checks of a chunk's header and directory, before any stream is unpacked (`rows`: of its table).

Every length that a later step allocates or indexes by is compared here with what the layout, the limits of the format
and the other counts allow. Raises `CorruptChunk` and nothing else. Only `decode` calls this.
"""

from __future__ import annotations

import struct

import zstandard

from dcr_daemon.canonical.box import MAX_RANK
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import ChunkId
from dcr_daemon.codec.format import Packing, Stream
from dcr_daemon.errors import CorruptChunk

WINDOW_LIMIT = 8 << 20  #: bytes a zstd frame may ask the decoder to keep beside its output
_HINT = "fetch the object again; if it stays so, the writer or the store is broken"


def corrupt(what: str) -> CorruptChunk:
    """The error of a chunk that is not as the format says."""
    return CorruptChunk(f"chunk is corrupt: {what}", hint=_HINT)


class PackedStream:
    """A stream as it lies in the object; `raw` is its unpacked size in bytes."""

    __slots__ = ("data", "packing", "raw")

    def __init__(self, data: memoryview, packing: Packing, *, raw: int) -> None:
        self.data, self.packing, self.raw = data, packing, raw

    def unpack(self) -> bytes | memoryview:
        if self.packing is Packing.RAW:
            return self.data
        try:
            frame = zstandard.get_frame_parameters(self.data)
            # Both are what the decoder would allocate, so they are judged first.
            if frame.content_size != self.raw or frame.window_size > max(self.raw, WINDOW_LIMIT):
                raise corrupt("a zstd frame declares another size than its stream")
            return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=self.raw, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise corrupt(f"a stream does not decompress: {error}") from error


def read_header(view: memoryview) -> fmt.Header:
    if len(view) < fmt.HEADER.size:
        raise corrupt(f"{len(view)} bytes are too short for a header")
    (magic, version, zero, checksum, attempt, base, new, rank, n, *ids, streams, zero2, segments) = fmt.HEADER.unpack(
        view[: fmt.HEADER.size]
    )
    if magic != fmt.MAGIC:
        raise corrupt("it does not begin like a chunk")
    if version != fmt.FORMAT:
        raise CorruptChunk(f"chunk has format {version}", hint=f"this release reads format {fmt.FORMAT}; upgrade")
    if zero or zero2:
        raise corrupt("reserved fields are set")
    if not 1 <= segments <= fmt.MAX_SEGMENTS or not 1 <= streams <= len(fmt.KINDS):
        raise corrupt(f"{segments} segments in {streams} streams are out of range")
    matches = [fmt.ID.fullmatch(field) for field in ids]
    if not all(matches):
        raise corrupt("an id is not of [a-z0-9]")
    stream, group, nonce = (match[1].decode() for match in matches if match)
    identity = ChunkId(stream=stream, attempt=attempt, base=base, version=new, group=group, rank=rank, nonce=nonce, n=n)
    return fmt.Header(identity, checksum, segments, streams)


def read_directory(view: memoryview, header: fmt.Header) -> dict[int, PackedStream]:
    """Streams by kind. Their stored sizes must fill the object exactly, their raw sizes stay under the limit."""
    streams: dict[int, PackedStream] = {}
    at = fmt.HEADER.size + header.streams * fmt.ENTRY.size
    last, total = -1, 0
    for i in range(header.streams):
        try:
            kind, packing, raw, stored = fmt.ENTRY.unpack_from(view, fmt.HEADER.size + i * fmt.ENTRY.size)
        except struct.error:
            raise corrupt("the directory is cut off") from None
        total += raw
        if kind not in fmt.KINDS or kind <= last or packing > Packing.ZSTD:
            raise corrupt(f"stream {kind} is unknown or out of order")
        if not raw or total > fmt.RAW_LIMIT or stored > len(view) - at:
            raise corrupt(f"stream {kind} has an impossible size")
        if stored >= raw if packing else stored != raw:
            raise corrupt(f"stream {kind} is not stored in its shorter form")
        streams[kind] = PackedStream(view[at : at + stored], Packing(packing), raw=raw)
        at, last = at + stored, kind
    if at != len(view):
        raise corrupt(f"{len(view) - at} bytes follow the last stream")
    if Stream.TABLE not in streams or streams[Stream.TABLE].raw > header.segments * (
        fmt.ROW_BYTES + MAX_RANK * fmt.AXIS_BYTES
    ):
        raise corrupt("segment table is missing or too large")
    return streams
