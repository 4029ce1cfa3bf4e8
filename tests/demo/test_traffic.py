"""Traffic reports every request truthfully: a cut stream or an early end is a failure, however polite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from dcr_demo.traffic import _request


def chunk(text: str, finish: str | None = None) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish}]})}\n\n".encode()


def against(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> dict[str, object]:
    async def main() -> dict[str, object]:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                return await _request(session, f"http://127.0.0.1:{port}", "p", 3)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def answered(*parts: bytes) -> dict[str, object]:
    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
        return answer

    return against(stream)


def test_a_whole_answer_is_a_success() -> None:
    result = answered(chunk("a"), chunk("b"), chunk("c", "length"), b"data: [DONE]\n\n")
    assert (result["tokens"], result["finish"], result["error"]) == (3, "length", None)


def test_an_aborted_answer_is_a_failure() -> None:
    result = answered(chunk("a"), chunk("b", "abort"), b"data: [DONE]\n\n")
    assert result["error"] == "ended with abort"


def test_a_cut_stream_is_a_failure() -> None:
    assert answered(chunk("a"))["error"] == "ended with None"


def test_a_refusal_is_a_failure() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise web.HTTPServiceUnavailable

    assert "503" in str(against(refuse)["error"])
