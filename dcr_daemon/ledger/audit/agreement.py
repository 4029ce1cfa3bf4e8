"""Checks what ranks put beside a version or an anchor, and no record names: what they agreed on, and why one failed.

For `verify` alone. Declarations, verdicts and failures have no digest in the bucket. So each is read until two reads
agree, must be what its name says, and must fit the others. Nobody needs them any more, once the version is sealed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, KeyNotFound
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.listed import ListedAbsent, read_listed
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.records import Anchor, AnchorIndex, AnchorShare, Seal
from dcr_daemon.projection.agreement.declaration import PACKED_LIMIT, Declaration, decode_declaration
from dcr_daemon.projection.agreement.gate import PACKED_LIMIT as VERDICT_LIMIT
from dcr_daemon.projection.agreement.gate import Verdict, decode_verdict
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited

AT_ONCE = 16  #: objects read at a time
_OF_RANK = re.compile(r"([^/]+)-(0|[1-9][0-9]*)-([a-z0-9]+)\.(?:([0-9]+)\.declaration|fail\.json|share\.json)")
_VERDICT = re.compile(r"([0-9]+)\.verdict")


@dataclass(frozen=True, slots=True)
class Found:
    """An object that was read; `wrong` says what is wrong with it, and is empty if nothing is."""

    key: str
    size: int
    wrong: str
    value: Declaration | Verdict | AnchorShare | None = None


async def check_attempt(store: Store, seal: Seal, layout: Layout) -> list[Found]:
    """The declarations, verdicts and failures of the attempt that was sealed; a few declarations are held at a time."""
    place = names.attempt(seal.version, seal.attempt)
    decode = partial(_of_attempt, seal=seal, layout=layout)
    keys = await _keys(store, place)
    found = await _read_all(store, place, [key for key in keys if _VERDICT.fullmatch(key, len(place))], decode)
    verdicts = {one.key: one.value for one in found if isinstance(one.value, Verdict)}
    others = [key for key in keys if not _VERDICT.fullmatch(key, len(place))]
    found += await _read_all(store, place, others, decode, then=partial(_judged, verdicts=verdicts))
    return found


async def check_anchor(store: Store, anchor: Anchor, index: AnchorIndex, *, objects: Objects) -> list[Found]:
    """What each rank put into an anchor, as it says itself, and the sums that belong to it."""
    place = anchor.index.key.rpartition("/")[0] + "/"
    shares = await _read_all(store, place, await _keys(store, place), partial(_of_anchor, anchor=anchor, index=index))
    refs = [one.value.sums for one in shares if isinstance(one.value, AnchorShare)]

    async def read_sums(key: str, size: int, digest: str) -> Found:
        try:
            await objects.read(records.ObjectRef(key, size, digest), anchor.version, limit=size)
        except (Corrupt, ObjectPending, BelowFloor) as error:
            return Found(key, size, error.message)
        return Found(key, size, "")

    sums = await run_limited((partial(read_sums, ref.key, ref.size, ref.sha256) for ref in refs), AT_ONCE)
    return [*shares, *sums]


async def _keys(store: Store, place: str) -> list[str]:
    """Everything below `place` that ranks put there and no record names."""
    keys = [entry.key async for entry in store.list(place)]
    return [key for key in keys if _OF_RANK.fullmatch(key, len(place)) or _VERDICT.fullmatch(key, len(place))]


async def _read_all(
    store: Store,
    place: str,
    keys: Iterable[str],
    decode: Callable[[str, bytes], Declaration | Verdict | AnchorShare | None],
    *,
    then: Callable[[Found], Found] = lambda one: one,
) -> list[Found]:
    """The objects `keys` below `place`, each given to `then` when it was read."""

    async def read(key: str) -> Found | None:
        name = key.removeprefix(place)
        limit = VERDICT_LIMIT if _VERDICT.fullmatch(name) else PACKED_LIMIT
        try:
            first = await store.get(key, limit=limit)
            body = await read_listed(store, key, limit=limit, patience=0, last=first)
            return then(Found(key, len(body), "", decode(name, body)))
        except (KeyNotFound, ListedAbsent):  # a LIST shows what retention has deleted meanwhile
            return None
        except (Corrupt, ValueError) as error:
            return Found(key, 0, error.message if isinstance(error, Corrupt) else f"it cannot be read: {error}")

    return [one for one in await run_limited((partial(read, key) for key in keys), AT_ONCE) if one]


def _of_attempt(name: str, body: bytes, *, seal: Seal, layout: Layout) -> Declaration | Verdict | None:
    if judged := _VERDICT.fullmatch(name):
        return _agreed(int(judged[1]), body, seal=seal, layout=layout, decode=decode_verdict)
    by = _OF_RANK.fullmatch(name)
    assert by is not None
    if by[4] is None:
        fail = records.decode_fail(body)
        _compare(
            (fail.stream, fail.attempt, fail.group, fail.rank, fail.nonce), (seal.stream, seal.attempt, *_rank(by))
        )
        return None
    declared = _agreed(int(by[4]), body, seal=seal, layout=layout, decode=decode_declaration)
    if isinstance(declared, Declaration):
        _compare((declared.group, declared.rank, declared.nonce), _rank(by))
    return declared


def _agreed(
    round_: int,
    body: bytes,
    *,
    seal: Seal,
    layout: Layout,
    decode: Callable[[bytes], Declaration | Verdict],
) -> Declaration | Verdict | None:
    if round_ > names.ROUNDS:
        if body != names.READY:
            raise ValueError(f"it is not {names.READY!r}")
        return None
    value = decode(body)
    _compare((value.attempt, value.layout), (seal.attempt, layout.digest))
    return value


def _of_anchor(name: str, body: bytes, *, anchor: Anchor, index: AnchorIndex) -> AnchorShare:
    share, by = records.decode_anchor_share(body), _OF_RANK.fullmatch(name)
    assert by is not None
    _compare(
        (share.stream, share.version, share.group, share.rank, share.nonce), (anchor.stream, anchor.version, *_rank(by))
    )
    if foreign := [ref.key for ref in share.files if ref not in index.files]:
        raise ValueError(f"it names {foreign[0]}, and the anchor does not")
    return share


def _rank(by: re.Match[str]) -> tuple[str, int, str]:
    """Group, rank and nonce, as a name says them."""
    return by[1], int(by[2]), by[3]


def _compare(found: tuple[object, ...], expected: tuple[object, ...]) -> None:
    if found != expected:
        raise ValueError(f"it is of another rank, attempt or stream: {found} instead of {expected}")


def _verdict_on(key: str) -> str:
    """Key of the verdict on a declaration."""
    place, _, name = key.rpartition("/")
    by = _OF_RANK.fullmatch(name)
    return f"{place}/{by[4]}.verdict" if by else ""


def _judged(one: Found, *, verdicts: Mapping[str, Verdict]) -> Found:
    """What was found, without its content: of many ranks that would be much."""
    verdict = verdicts.get(_verdict_on(one.key))
    if isinstance(one.value, Declaration) and verdict and not verdict.admits(one.value):
        return Found(one.key, one.size, "it is not what the verdict of its round is about")
    return Found(one.key, one.size, one.wrong)
