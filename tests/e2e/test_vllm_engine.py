"""Every edge of the engine's transaction diagram on real vLLM servers, and what nobody may talk them into."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.vllm.server import ModelVersions, Rig

from dcr_daemon.engine.port import EngineGone, Transaction, Verdict, VersionDelta
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Fenced

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = "Once upon a time there was a model that learned while it was talking. " * 4


def vector(rig: Rig, version: int) -> bytes:
    return rig.versions.vector(version).tobytes()


# -- born paused, proved, served --------------------------------------------------------------------------------------


async def test_a_server_is_born_paused_and_serves_only_a_proved_version(dense: Rig) -> None:
    status, attached = dense.birth["status"], dense.birth["attached"]
    assert (status.version, status.serving, attached.serving, attached.version) == (None, False, False, None)
    assert attached.vector == vector(dense, 0)
    assert "not proved" in dense.birth["refusal"]
    await dense.own()
    assert dense.weight_version() == f"v{dense.versions.newest}"


async def test_the_port_is_shut_until_a_proved_version_is_served(dense: Rig) -> None:
    assert not dense.birth["healthy"]
    await dense.own()
    assert dense.server.healthy()


async def test_the_socket_is_private(dense: Rig) -> None:
    await dense.own()
    assert dense.server.socket.stat().st_mode & 0o777 == 0o600
    assert dense.server.socket.parent.stat().st_mode & 0o777 == 0o700


async def test_a_version_that_is_not_live_is_never_proved(dense: Rig) -> None:
    engine = await dense.own()
    other = ModelVersions(dense.fresh_home(), dense.server.model, seed=9)
    other.step()
    with pytest.raises(EngineRefused, match=r"model\.embed_tokens\.weight"):
        await engine.prove(1, other.vector_file(1), "v1")
    assert (await engine.status()).version == dense.versions.newest


async def test_a_stream_of_another_layout_is_refused_with_every_tensor_named(dense: Rig) -> None:
    await dense.own()
    with pytest.raises(EngineRefused, match=r"model\.norm\.weight.*another model"):
        await VllmEngine(dense.server.socket).attach(dense.versions.facts_without("model.norm.weight"))


# -- the diagram ------------------------------------------------------------------------------------------------------


async def test_prepare_swap_commit_reaches_every_bit(dense: Rig) -> None:
    engine = await dense.own()
    version = dense.versions.step()
    prepared = await engine.prepare(dense.versions.transaction(version))
    assert prepared.fits == 1
    status = await engine.status()
    assert (status.prepared, status.version, status.serving) == (f"to-{version}", version - 1, True)
    swapped = await engine.swap(f"to-{version}")
    assert (swapped.verdict, swapped.version, swapped.serving, swapped.tries) == (Verdict.COMMITTED, version, True, 1)
    assert swapped == await engine.outcome(f"to-{version}")
    assert swapped == await engine.swap(f"to-{version}")  # asked again by one that lost the answer
    assert await dense.live() == vector(dense, version)
    assert dense.weight_version() == f"v{version}"


async def test_a_dropped_transaction_leaves_nothing_behind(dense: Rig) -> None:
    engine = await dense.own()
    version = dense.versions.step()
    await engine.prepare(dense.versions.transaction(version))
    await engine.drop()
    assert (await engine.status()).prepared is None
    with pytest.raises(EngineRefused, match="not prepared"):
        await engine.swap(f"to-{version}")
    assert (await dense.refit(version)).verdict is Verdict.COMMITTED


async def test_a_failed_apply_is_tried_again(dense: Rig) -> None:
    engine = await dense.own()
    version = dense.versions.step()
    dense.plant("apply")
    swapped = await dense.refit(version)
    assert (swapped.verdict, swapped.tries) == (Verdict.COMMITTED, 2)
    assert (await engine.status()).serving
    assert await dense.live() == vector(dense, version)


@pytest.mark.parametrize("fault", ["apply", "flip"])
async def test_two_failed_applies_roll_back_to_every_old_bit(dense: Rig, fault: str) -> None:
    engine = await dense.own()
    version = dense.versions.step()
    dense.plant(fault, times=2)
    swapped = await dense.refit(version)
    assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.ROLLED_BACK, version - 1, True)
    assert swapped.reason
    assert (await engine.status()).version == version - 1
    assert await dense.live() == vector(dense, version - 1)
    await dense.own_at(version - 1)
    await dense.engine.prepare(dense.versions.transaction(version, name="again"))
    assert (await dense.engine.swap("again")).verdict is Verdict.COMMITTED


async def leave_begun(rig: Rig) -> int:
    """A transaction that could neither be applied nor rolled back."""
    await rig.own()
    version = rig.versions.step()
    rig.plant("apply", times=2)
    rig.plant("rollback", times=2)
    swapped = await rig.refit(version)
    assert (swapped.verdict, swapped.serving, swapped.version) == (Verdict.BEGUN, False, None)
    return version


async def test_the_next_owner_adopts_what_was_begun_and_ends_it(dense: Rig) -> None:
    version = await leave_begun(dense)
    engine = VllmEngine(dense.server.socket)  # the subscriber that began it is gone
    attached = await engine.attach(dense.versions.facts())
    assert (attached.adopted, attached.serving, attached.version) == (f"to-{version}", False, None)
    with pytest.raises(EngineRefused, match="begun"):
        await engine.prepare(dense.versions.transaction(version, name="other"))
    with pytest.raises(EngineRefused, match="begun"):
        await engine.serve()
    settled = await engine.finish_adopted(f"to-{version}")
    assert (settled.verdict, settled.version, settled.serving) == (Verdict.COMMITTED, version, True)
    assert await dense.live() == vector(dense, version)


async def test_nobody_resumes_an_engine_with_a_begun_transaction(dense: Rig) -> None:
    await leave_begun(dense)
    for path in ("/resume", "/wake_up"):
        status, text = dense.post(path)
        assert status >= 400, (path, text)
    status = await dense.engine.status()
    assert (status.serving, status.version) == (False, None)
    assert await dense.becomes_unhealthy()


async def test_what_can_neither_go_forward_nor_back_is_repaired_by_a_dense_load(dense: Rig) -> None:
    version = await leave_begun(dense)
    dense.plant("apply", times=2)
    dense.plant("rollback", times=2)
    assert (await dense.engine.finish_adopted(f"to-{version}")).verdict is Verdict.BEGUN
    versions = dense.versions
    files, label = versions.anchor(version), f"v{version}"
    loaded = await dense.engine.load(version, files, versions.vector_file(version), label)
    assert (loaded.verdict, loaded.version, loaded.serving) == (Verdict.COMMITTED, version, True)
    assert await dense.live() == vector(dense, version)
    assert dense.weight_version() == label


async def test_a_damaged_anchor_file_is_refused_and_a_good_one_still_repairs(dense: Rig) -> None:
    version = await leave_begun(dense)
    versions, engine = dense.versions, dense.engine
    short = versions.truncated_anchor(version)
    with pytest.raises(DcrError):
        await engine.load(version, [short], versions.vector_file(version), "bad")
    assert not (await engine.status()).serving
    loaded = await engine.load(version, versions.anchor(version), versions.vector_file(version), f"v{version}")
    assert loaded.verdict is Verdict.COMMITTED
    assert await dense.live() == vector(dense, version)


async def test_escalation_ends_with_the_engine_process(dense: Rig) -> None:
    version = await leave_begun(dense)
    versions = dense.versions
    wrong = versions.anchor(version - 1)
    first = await dense.engine.load(version, wrong, versions.vector_file(version), "bad")
    assert first.verdict is Verdict.BEGUN
    with pytest.raises((EngineGone, DcrError)):
        await dense.engine.load(version, wrong, versions.vector_file(version), "bad")
    dense.server.process.wait(60)
    versions.forget_after(0)


# -- refused, with nothing written ------------------------------------------------------------------------------------


async def refused(rig: Rig, txn: Transaction, kind: type[DcrError], text: str) -> None:
    """Preparing `txn` is refused and changes neither weights nor service."""
    newest = rig.versions.newest
    with pytest.raises(kind, match=text):
        await rig.engine.prepare(txn)
    status = await rig.engine.status()
    assert (status.prepared, status.begun, status.version, status.serving) == (None, None, newest, True)
    assert await rig.live() == vector(rig, newest)


async def test_a_delta_made_from_another_base_is_refused(dense: Rig) -> None:
    other, base = await dense.stranger(seed=5)
    await refused(dense, other.transaction(base + 1), EngineRefused, "not the base of version")


async def test_a_delta_whose_old_values_are_not_the_live_ones_is_refused(dense: Rig) -> None:
    """The vectors agree with the live weights; only the elements that the chunk changes tell."""
    other, base = await dense.stranger(seed=6)
    versions, hop = dense.versions, other.hop(base + 1)
    lies = VersionDelta(
        version=hop.version,
        base=base,
        attempt=hop.attempt,
        chunks=hop.chunks,
        before=versions.vector_file(base),
        after=other.claim(versions.vector(base), base + 1),
    )
    txn = Transaction(id="lies", hops=[lies], label="lies")
    await refused(dense, txn, EngineRefused, "not what version .* was made from")


async def test_a_version_that_lacks_a_chunk_is_refused(dense: Rig) -> None:
    await dense.own()
    draft = dense.draft()
    hop = draft.hop(draft.newest)
    part = VersionDelta(
        version=hop.version,
        base=hop.base,
        attempt=hop.attempt,
        chunks=hop.chunks[:-1],
        before=hop.before,
        after=hop.after,
    )
    txn = Transaction(id="part", hops=[part], label="part")
    await refused(dense, txn, EngineRefused, "do not lead from its base to its seal")


async def test_a_corrupted_chunk_is_refused(dense: Rig) -> None:
    await dense.own()
    draft = dense.draft()
    spoiled = draft.hop(draft.newest, edit=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    txn = Transaction(id="spoiled", hops=[spoiled], label="spoiled")
    await refused(dense, txn, Corrupt, "corrupt")


async def test_a_chunk_of_another_version_is_refused(dense: Rig) -> None:
    await dense.own()
    draft = dense.draft()
    draft.step()
    right, wrong = draft.hop(draft.newest - 1), draft.hop(draft.newest)
    mixed = VersionDelta(
        version=right.version,
        base=right.base,
        attempt=right.attempt,
        chunks=[*right.chunks[:-1], wrong.chunks[-1]],
        before=right.before,
        after=right.after,
    )
    await refused(dense, Transaction(id="mixed", hops=[mixed], label="mixed"), Corrupt, "version")


async def test_a_failure_inside_the_job_is_told_and_the_next_prepare_works(dense: Rig) -> None:
    await dense.own()
    version = dense.versions.step()
    dense.plant("job")
    with pytest.raises(DcrError, match="planted"):
        await dense.engine.prepare(dense.versions.transaction(version))
    assert (await dense.refit(version)).verdict is Verdict.COMMITTED


async def test_weights_written_by_somebody_else_end_the_proof(dense: Rig) -> None:
    await dense.own()
    version = dense.versions.step()
    await dense.engine.prepare(dense.versions.transaction(version))
    status, text = dense.post("/collective_rpc", {"method": "reload_weights"})
    assert status == 200, text
    with pytest.raises(EngineRefused):
        await dense.engine.swap(f"to-{version}")
    after = await dense.engine.status()
    assert (after.version, after.serving) == (None, False)
    status, text = dense.post("/resume")
    assert status >= 400, text


# -- routes and caps --------------------------------------------------------------------------------------------------


async def test_a_route_over_versions_is_one_change(dense: Rig) -> None:
    engine = await dense.own()
    last = dense.versions.newest
    for _ in range(3):
        dense.versions.step(0.01)
    prepared = await engine.prepare(dense.versions.transaction(last + 1, last + 2, last + 3, name="route"))
    assert prepared.fits == 3
    assert (await engine.swap("route")).version == last + 3
    assert await dense.live() == vector(dense, last + 3)


async def test_a_route_over_the_cap_stops_at_a_version_boundary(dense: Rig) -> None:
    engine = await dense.own()
    last = dense.versions.newest
    for _ in range(3):
        dense.versions.step(0.15)
    prepared = await engine.prepare(dense.versions.transaction(last + 1, last + 2, last + 3, name="long"))
    assert 1 <= prepared.fits < 3
    swapped = await engine.swap("long")
    assert swapped.version == last + prepared.fits
    assert await dense.live() == vector(dense, last + prepared.fits)


async def test_a_version_over_the_cap_alone_is_refused_as_exhausted(dense: Rig) -> None:
    await dense.own()
    draft = dense.draft(rate=0.9)
    with pytest.raises(DcrError, match="DCR_STAGE_CAP"):
        await dense.engine.prepare(draft.transaction(draft.newest))
    assert (await dense.engine.status()).serving


# -- while it answers -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def streamed(rig: Rig, tokens: int) -> AsyncIterator[list[str]]:
    """A streamed completion of exactly `tokens` tokens; the list grows as they come and ends with the reason.

    One event may carry several tokens, so their number is the server's own count.
    """
    seen: list[str] = []

    def read() -> None:
        body = {"model": "m", "prompt": "stream", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            rig.server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    seen.extend(choice.get("finish_reason") or choice["text"] for choice in event["choices"])
        delivered.append(event["usage"]["completion_tokens"])

    delivered: list[int] = []
    task = asyncio.create_task(asyncio.to_thread(read))
    while not seen:  # noqa: ASYNC110  another thread fills it
        await asyncio.sleep(0.01)
    yield seen
    await task
    assert delivered == [tokens]


async def test_a_streamed_request_goes_on_during_prepare(dense: Rig) -> None:
    engine = await dense.own()
    await dense.complete("warm up", max_tokens=4)
    version = dense.versions.step()
    async with streamed(dense, 400) as seen:
        dense.plant("slow", times=40, seconds=0.05)
        before = len(seen)
        await engine.prepare(dense.versions.transaction(version))
        during = len(seen) - before
        dense.plant("slow", times=0)
        assert (await engine.swap(f"to-{version}")).verdict is Verdict.COMMITTED
    assert during >= 5  # a prepare that held generation up would let one step through
    assert seen[-1] == "length"


async def test_requests_in_flight_across_swaps_all_finish_at_full_length(dense: Rig) -> None:
    await dense.own()
    await dense.complete("warm up", max_tokens=4)
    tasks = [
        asyncio.create_task(dense.complete(f"request {n}", max_tokens=150, ignore_eos=True, return_token_ids=True))
        for n in range(4)
    ]
    for _ in range(3):
        await asyncio.sleep(0.2)
        version = dense.versions.step()
        assert (await dense.refit(version)).verdict is Verdict.COMMITTED
    for choice in await asyncio.gather(*tasks):
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 150)


async def test_the_same_prompt_answers_as_the_new_policy_whatever_the_prefix_cache_holds(dense: Rig) -> None:
    await dense.own()

    async def answer(**fields: Any) -> list[float]:
        choice = await dense.complete(PROMPT, max_tokens=8, **fields)
        return choice["logprobs"]["token_logprobs"]

    first = await answer()
    version = dense.versions.step(0.1)
    assert (await dense.refit(version)).verdict is Verdict.COMMITTED
    again = await answer()
    assert again != first
    assert again == await answer(cache_salt=f"nobody-{version}")  # what it says without any cached prefix
    back = dense.versions.put(dense.versions.values[version - 1])
    assert (await dense.refit(back)).verdict is Verdict.COMMITTED
    assert await answer() == first


# -- who owns it ------------------------------------------------------------------------------------------------------


async def test_a_second_owner_fences_the_first(dense: Rig) -> None:
    first = await dense.own()
    version = dense.versions.step()
    await first.prepare(dense.versions.transaction(version))
    second = VllmEngine(dense.server.socket)
    attached = await second.attach(dense.versions.facts())
    assert (attached.version, attached.serving) == (version - 1, True)
    for call in (
        first.swap(f"to-{version}"),
        first.prepare(dense.versions.transaction(version)),
        first.serve(),
        first.drop(),
    ):
        with pytest.raises(Fenced):
            await call
    with pytest.raises(EngineRefused, match="not prepared"):  # dropped at attach
        await second.swap(f"to-{version}")
    dense.engine = second
    assert (await dense.refit(version)).verdict is Verdict.COMMITTED


async def test_attach_ends_a_prepare_that_nobody_waits_for(dense: Rig) -> None:
    first = await dense.own()
    version = dense.versions.step()
    dense.plant("slow", times=200, seconds=0.05)
    running = asyncio.create_task(first.prepare(dense.versions.transaction(version)))
    await asyncio.sleep(0.3)
    second = VllmEngine(dense.server.socket)
    dense.plant("slow", times=0)
    await second.attach(dense.versions.facts())
    with pytest.raises(Fenced):
        await running
    dense.engine = second
    assert (await dense.refit(version)).verdict is Verdict.COMMITTED


async def test_a_client_that_hangs_up_during_a_swap_finds_the_outcome(dense: Rig) -> None:
    await dense.own()
    version = dense.versions.step()
    await dense.engine.prepare(dense.versions.transaction(version))
    await dense.hang_up_after_swap(f"to-{version}")
    other = VllmEngine(dense.server.socket)
    while (outcome := await other.outcome(f"to-{version}")).verdict is Verdict.UNKNOWN:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert (outcome.verdict, outcome.version) == (Verdict.COMMITTED, version)


async def test_a_dead_incarnation_is_told_apart(dense: Rig) -> None:
    engine = await dense.own()
    engine._incarnation = "0123456789abcdef"
    with pytest.raises(EngineGone, match="restarted"):
        await engine.drop()


# -- experts, two workers ---------------------------------------------------------------------------------------------


async def test_experts_on_two_workers_reach_every_bit(moe: Rig) -> None:
    await moe.own()
    version = moe.versions.step()
    assert (await moe.refit(version)).verdict is Verdict.COMMITTED
    assert await moe.live() == vector(moe, version)
    await moe.own()
    report = await moe.engine.inspect()
    assert report.version == version
    held = {tensor.name: tensor.held for tensor in report.tensors}
    assert set(held) == {spec.name for spec in moe.versions.layout}
    assert held["model.layers.0.mlp.experts.3.up_proj.weight"] == [4096, 4096]  # half on each worker
    assert held["model.norm.weight"] == [128, 128]  # a replica on each


async def test_a_failed_apply_on_two_workers_rolls_back(moe: Rig) -> None:
    await moe.own()
    version = moe.versions.step()
    moe.plant("flip", times=2)
    assert (await moe.refit(version)).verdict is Verdict.ROLLED_BACK
    assert await moe.live() == vector(moe, version - 1)


async def test_a_planted_wrong_expert_permutation_is_never_proved(moe: Rig) -> None:
    await moe.own()
    versions = moe.versions
    engine = VllmEngine(moe.server.socket)
    moe.plant("placement", times=100)
    with pytest.raises(EngineRefused):  # another layout: the placement is recorded anew
        await engine.attach(versions.facts_without("model.norm.weight"))
    attached = await engine.attach(versions.facts())
    assert attached.vector != vector(moe, versions.newest)
    assert (attached.version, attached.serving) == (None, False)
    with pytest.raises(EngineRefused, match="experts"):
        await engine.prove(versions.newest, versions.vector_file(versions.newest), "wrong")
    with pytest.raises(EngineRefused, match="not proved"):
        await engine.serve()
    moe.plant("placement", times=0)
    with pytest.raises(EngineRefused):
        await engine.attach(versions.facts_without("model.norm.weight"))
    await moe.own()
    assert (await moe.engine.status()).serving


async def test_replies_that_somebody_elses_failed_call_left_behind_are_read_past(moe: Rig) -> None:
    await moe.own()
    status, _ = moe.post("/collective_rpc", {"method": "no_such_method"})
    assert status >= 400
    version = moe.versions.step()
    assert (await moe.refit(version)).verdict is Verdict.COMMITTED
    assert await moe.live() == vector(moe, version)


async def test_health_tells_whether_the_version_is_known_when_the_port_is_open_early(moe: Rig) -> None:
    await moe.own()
    assert moe.server.healthy()
    moe.post("/collective_rpc", {"method": "update_config", "kwargs": {"overrides": {}}})
    with pytest.raises(EngineRefused):
        await moe.engine.prove(0, moe.versions.vector_file(0), "v0")
    assert await moe.becomes_unhealthy()
