"""The keys of a stream's objects; every key is made here and nowhere else (docs/FORMAT.md 3)."""

from __future__ import annotations

LEDGER = "ledger/"  #: the records
LAYOUTS = "layouts/"
DATA = "data/"  #: what attempts upload
ROUNDS = 2  #: number of rounds in which ranks agree on what each holds
READY = b"ready"  #: all that ranks declare in the round after those, and all that rank 0 answers
ANCHORS = "anchors/"  #: complete versions
REPLICAS = "replicas/"  #: status objects
PROBES = "probe/"  #: objects of a start-up probe that was not allowed to delete them


def record(seq: int) -> str:
    return f"{LEDGER}{seq:016d}.json"


def record_page(number: int, digits: int) -> str:
    """What the names of the records from `number * 10**digits` on begin with, as far as that number reaches."""
    return f"{LEDGER}{number:0{16 - digits}d}"


def layout(digest: str) -> str:
    return f"{LAYOUTS}{digest}.json"


def attempt(version: int, attempt: int) -> str:
    """Prefix of everything one attempt uploads."""
    return f"{DATA}{version}/{attempt}/"


def chunk(version: int, attempt_: int, group: str, rank: int, nonce: str, n: int) -> str:
    return f"{attempt(version, attempt_)}{group}-{rank}-{nonce}-{n}.dcr"


def part(version: int, attempt_: int, group: str, rank: int, nonce: str) -> str:
    return f"{attempt(version, attempt_)}{group}-{rank}-{nonce}.part.json"


def sums(version: int, attempt_: int, group: str, rank: int, nonce: str) -> str:
    return f"{attempt(version, attempt_)}{group}-{rank}-{nonce}.sums"


def sums_of(part_key: str) -> str:
    """The name of the sums that lie beside a part."""
    return f"{part_key.removesuffix('.part.json')}.sums"


def fail(version: int, attempt_: int, group: str, rank: int, nonce: str) -> str:
    return f"{attempt(version, attempt_)}{group}-{rank}-{nonce}.fail.json"


def declaration(version: int, attempt_: int, group: str, rank: int, nonce: str, round_: int) -> str:
    """What a rank declares in one round: rounds 1 and 2 until a version of its group is sealed; round 3 ("ready")
    before every export."""
    return f"{attempt(version, attempt_)}{group}-{rank}-{nonce}{declared(round_)}"


def declared(round_: int) -> str:
    """How the names of a round's declarations end."""
    return f".{round_}.declaration"


def verdict(version: int, attempt_: int, round_: int) -> str:
    """What rank 0 says about all declarations of a round."""
    return f"{attempt(version, attempt_)}{round_}.verdict"


def vector(version: int, attempt_: int) -> str:
    """The version's whole fingerprint vector, u64 little-endian in layout order."""
    return f"{attempt(version, attempt_)}fingerprint.bin"


def anchor(version: int, attempt_: int) -> str:
    """Prefix of one attempt at an anchor: the number is the seq of the newest record that its writer had read, which is
    at least that of its own claim. So retention can tell whose it is (must L5)."""
    return f"{ANCHORS}{version}/{attempt_}/"


def anchor_file(version: int, attempt_: int, *, group: str, rank: int, nonce: str, n: int) -> str:
    """The n-th file of what a rank holds."""
    return f"{anchor(version, attempt_)}{group}-{rank}-{nonce}-{n:05d}.safetensors"


def anchor_share(version: int, attempt_: int, *, group: str, rank: int, nonce: str) -> str:
    """What a rank put into an anchor."""
    return f"{anchor(version, attempt_)}{group}-{rank}-{nonce}.share.json"


def anchor_sums(version: int, attempt_: int, *, group: str, rank: int, nonce: str) -> str:
    return f"{anchor(version, attempt_)}{group}-{rank}-{nonce}.sums"


def replica(replica_id: str) -> str:
    return f"{REPLICAS}{replica_id}.json"
