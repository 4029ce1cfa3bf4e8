"""The socket's client: what it does when the other side is absent, goes away, or says something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import Answer
from dcr_daemon.engine.port import Attached, EngineGone, EngineStatus, StreamFacts, Swapped, Verdict
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.errors import (
    Corrupt,
    CorruptChunk,
    DcrError,
    EngineRefused,
    Fenced,
    Incompatible,
    ResourceExhausted,
    UsageError,
)

STATUS = EngineStatus(incarnation="i", version=3, serving=True)
FACTS = StreamFacts(stream="s", layout="/l", layout_digest="d")


@asynccontextmanager
async def server(path: Path, answer: Callable[[messages.AnyCall], Awaitable[bytes]]) -> AsyncIterator[None]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await messages.read_frame(reader)
        if body is not None:
            writer.write(await answer(messages.decode_call(body)))
            await writer.drain()
        writer.close()

    running = await asyncio.start_unix_server(connected, str(path))
    try:
        yield
    finally:
        running.close()


def framed(answer: Answer) -> bytes:
    return messages.frame(messages.encode(answer))


async def test_an_absent_engine_is_gone_and_the_hint_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(EngineGone, match="DCR_SOCKET"):
        await VllmEngine(tmp_path / "none.sock").status()


async def test_an_engine_that_hangs_up_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "e"

    async def nothing(call: messages.AnyCall) -> bytes:
        return b""

    async def half(call: messages.AnyCall) -> bytes:
        return framed(messages.done(call.id, STATUS))[:-1]

    for answer in (nothing, half):
        async with server(path, answer):
            with pytest.raises(EngineGone):
                await VllmEngine(path).status()
        path.unlink(missing_ok=True)


async def test_an_answer_counts_only_under_the_calls_own_id(tmp_path: Path) -> None:
    async def other(call: messages.AnyCall) -> bytes:
        return framed(messages.done("another", STATUS))

    async with server(tmp_path / "e", other):
        with pytest.raises(EngineGone, match="another call"):
            await VllmEngine(tmp_path / "e").status()


async def test_calls_of_two_clients_never_share_an_id(tmp_path: Path) -> None:
    seen: list[str] = []

    async def note(call: messages.AnyCall) -> bytes:
        seen.append(call.id)
        return framed(messages.done(call.id, STATUS))

    async with server(tmp_path / "e", note):
        clients = [VllmEngine(tmp_path / "e") for _ in range(3)]
        for client in clients:
            assert await client.status() == STATUS
            await client.status()
    assert len(set(seen)) == 6


@pytest.mark.parametrize(
    "error", [EngineRefused, Fenced, EngineGone, UsageError, Incompatible, Corrupt, ResourceExhausted, DcrError]
)
async def test_every_kind_of_error_crosses_with_its_hint(tmp_path: Path, error: type[DcrError]) -> None:
    async def refuse(call: messages.AnyCall) -> bytes:
        return framed(messages.refused(call.id, error("what", hint="how")))

    async with server(tmp_path / "e", refuse):
        with pytest.raises(error) as caught:
            await VllmEngine(tmp_path / "e").status()
    assert type(caught.value) is error
    assert (caught.value.message, caught.value.hint) == ("what", "how")


def test_an_error_below_one_that_may_cross_arrives_as_its_parent() -> None:
    assert messages.refused("x", CorruptChunk("bad")).kind == "Corrupt"


async def test_nothing_that_changes_the_engine_is_sent_before_attach(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path / "e")
    for call in (engine.serve(), engine.drop(), engine.swap("t"), engine.prove(1, "v", "l"), engine.inspect()):
        with pytest.raises(UsageError, match="attached"):
            await call


async def test_the_owner_repeats_the_token_that_attach_brought(tmp_path: Path) -> None:
    calls: list[messages.AnyCall] = []
    attached = Attached(token=7, incarnation="inc", adopted=None, version=None, serving=False, vector=b"", classes=[])
    swapped = Swapped(txn="t", verdict=Verdict.COMMITTED, version=1, serving=True)

    async def answer(call: messages.AnyCall) -> bytes:
        calls.append(call)
        result = {messages.Attach: attached, messages.Swap: swapped}.get(type(call))
        return framed(messages.done(call.id, result))

    async with server(tmp_path / "e", answer):
        engine = VllmEngine(tmp_path / "e")
        assert await engine.attach(FACTS) == attached
        assert await engine.swap("t") == swapped
        await engine.serve()
    owned = [call for call in calls if isinstance(call, messages.Owned)]
    assert [(call.token, call.incarnation) for call in owned] == [(7, "inc")] * 2


async def test_an_answer_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async def huge(call: messages.AnyCall) -> bytes:
        return (messages.FRAME_LIMIT + 1).to_bytes(4, "big")

    async with server(tmp_path / "e", huge):
        with pytest.raises(UsageError, match="limit"):
            await VllmEngine(tmp_path / "e").status()


async def test_an_attach_names_the_ownership_before_unless_its_own_answer_was_lost(tmp_path: Path) -> None:
    """After a lost answer the token may have been raised by this client itself, which is no reason to stop."""
    path, seen, answers = tmp_path / "e", list[tuple[int, str]](), iter(["done", "Fenced", "lost", "done"])

    async def engine(call: messages.AnyCall) -> bytes:
        assert isinstance(call, messages.Attach)
        seen.append((call.token, call.incarnation))
        match next(answers):
            case "done":
                attached = Attached(
                    token=7, incarnation="i", adopted=None, version=None, serving=False, vector=b"", classes=[]
                )
                return framed(messages.done(call.id, attached))
            case "Fenced":
                return framed(messages.refused(call.id, Fenced("another subscriber attached")))
        return b""

    async with server(path, engine):
        client = VllmEngine(path)
        await client.attach(FACTS)
        with pytest.raises(Fenced):
            await client.attach(FACTS)
        with pytest.raises(EngineGone):
            await client.attach(FACTS)
        await client.attach(FACTS)
    assert seen == [(0, ""), (7, "i"), (7, "i"), (0, "")]


def test_records_come_back_as_they_were() -> None:
    for call in (
        messages.Attach(id="1", facts=FACTS),
        messages.Load(id="2", version=3, files=["a"], vector="v", label="l", token=1, incarnation="i"),
        messages.Poll(id="3"),
    ):
        assert messages.decode_call(messages.encode(call)) == call
    with pytest.raises(UsageError):
        messages.decode_call(b"\x81\xa2op\xa4none")
    with pytest.raises(UsageError):
        messages.decode_answer(b"nonsense")
