"""What each target starts from: valid inputs for those that take bytes as they are, a few choices for the others."""

from __future__ import annotations

import msgspec
from fuzz import samples

from dcr_daemon.engine import messages
from dcr_daemon.engine.directory.journal import MAGIC
from dcr_daemon.ledger import records
from dcr_daemon.ledger.high_water_mark import Mark

INSIDE = [b"", bytes(range(64)), b"\xff" * 24, b"\0\1\2\3" * 12, b"\5\4\3\2\1" * 20]
TOML = b'endpoint-url = "http://x"\n[publish]\nto = "s3://b/p"\nwatch = "/w"\n[status]\njson = true\n'
INDEX = b'{"metadata": {"total_size": 1}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}'


def _journal() -> bytes:
    head = b'{"kind":"patch","txn":"t","stream":"s","layout":"l","version":2,"label":"2","vector":"v","base":1}'
    entry = (0).to_bytes(8, "little") + (2).to_bytes(8, "little") + (4).to_bytes(8, "little")
    columns = b"\1\0\0\0\5\0\0\0" + b"\1\0\2\0" + b"\3\0\4\0"
    return MAGIC + len(head).to_bytes(8, "little") + head + entry + columns


def seeds(target: str) -> list[bytes]:
    """Inputs for a target by name; small, valid, of every kind there is."""
    if target.endswith("_inside"):
        return INSIDE
    stream = samples.stream()
    assert stream.seal is not None
    assert stream.anchor is not None
    tip = stream.tips[-1]
    seen = Mark(stream=tip.stream, seq=tip.seq, digest=tip.digest, state=tip.state, served=1)
    call_bodies = [messages.encode(call) for call in samples.call_records()]
    answer_bodies = [messages.encode(answer) for answer in samples.answers()]
    return {
        "record": stream.bodies,
        "part": [stream.store.objects[stream.seal.parts[0].key]],
        "anchor_index": [stream.store.objects[stream.anchor.index.key]],
        "layout": [samples.LAYOUT.encoded, b"[]"],
        "key": [key.encode() for key in stream.store.objects],
        "chunk": [body for body in samples.chunks() if len(body) < 4000],
        "chunk_header": [body[:152] for body in samples.chunks()[:2]],
        "safetensors_bytes": samples.safetensors_files(),
        "safetensors_file": samples.safetensors_files(),
        "hf_index": [INDEX],
        "socket_frames": [b"".join(map(messages.frame, call_bodies)), b"".join(map(messages.frame, answer_bodies))],
        "socket_records": call_bodies + answer_bodies,
        "worker_calls": [msgspec.msgpack.encode(envelope) for envelope in samples.plugin_calls()],
        "status": [msgspec.json.encode(samples.report())],
        "mark": [records.encode(seen)],
        "published_list": [
            b'{"stream":"0123456789abcdef","watch":"/w","version":3,"sources":[{"path":"a","files":[["b",1,2,3]]}]}'
        ],
        "baseline_hint": [
            b'{"stream":"0123456789abcdef","layout":"%s","version":1,"vector":"%s"}'
            % (samples.LAYOUT.digest.encode(), b"00" * 8 * len(samples.LAYOUT))
        ],
        "directory_marks": [
            b'{"format":1,"stream":"s","layout":"l","version":1,"label":"1","vector":"v","txn":"t"}',
            b'{"stream":"s","txn":"t"}',
            b'{"token":4,"nonce":"n"}',
        ],
        "journal": [_journal(), _journal()[:-12]],
        "config": [TOML],
    }[target]
