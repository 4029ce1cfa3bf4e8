"""What is put into EngineCore, what is checked before, and how the process ends when a worker does not answer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcr_daemon.vllm_plugin.compat import UnsupportedVllm
from dcr_daemon.vllm_plugin.core import hooks
from dcr_daemon.vllm_plugin.settings import Settings


def test_a_call_that_does_not_come_back_ends_the_engine() -> None:
    ended = threading.Event()
    why: list[str] = []

    def end(reason: str) -> None:
        why.append(reason)
        ended.set()

    watchdog = hooks.Watchdog(0.05, end)
    with watchdog.watching("apply"):
        assert ended.wait(10)
    assert "apply" in why[0]


def test_calls_in_time_end_nothing() -> None:
    ended = threading.Event()
    watchdog = hooks.Watchdog(0.2, lambda reason: ended.set())
    for _ in range(50):
        with watchdog.watching("apply"):
            pass
    assert not ended.wait(0.5)


def test_a_watchdog_can_be_switched_off() -> None:
    before = threading.active_count()
    with hooks.Watchdog(0, lambda reason: None).watching("apply"):
        assert threading.active_count() == before


def test_an_executor_without_queues_of_replies_is_refused_by_name() -> None:
    """As Ray's first executor; one worker inside EngineCore needs none."""
    uniproc = pytest.importorskip("vllm.v1.executor.uniproc_executor")

    def refusal(executor: Any) -> str:
        return hooks.ExecutorTransport(executor, hooks.Watchdog(0, lambda reason: None)).unsupported

    assert refusal(SimpleNamespace(response_mqs=[])) == ""
    assert refusal(object.__new__(uniproc.UniProcExecutor)) == ""
    assert "the replies of SimpleNamespace" in refusal(SimpleNamespace())
    assert "mp" in refusal(SimpleNamespace())


def test_an_engine_without_our_workers_does_not_start() -> None:
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls="")))
    with pytest.raises(UnsupportedVllm, match="--worker-extension-cls"):
        hooks.make_core(engine, Settings(socket=Path("/run/dcr/vllm.sock")))


def test_resume_asks_the_core_whoever_calls_it() -> None:
    resumed: list[Any] = []
    resume = hooks._guarded(resumed.append)
    with pytest.raises(RuntimeError, match="no dcr core"):
        resume(SimpleNamespace())
    with pytest.raises(RuntimeError, match="resume refused: it is Tuesday"):
        resume(SimpleNamespace(dcr=SimpleNamespace(state=SimpleNamespace(why_not_resume=lambda: "it is Tuesday"))))
    assert resumed == []
    resume(SimpleNamespace(dcr=SimpleNamespace(state=SimpleNamespace(why_not_resume=lambda: ""))))
    assert len(resumed) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DCR_SOCKET", "relative.sock"),
        ("DCR_SOCKET", "/" + "x" * 120),
        ("DCR_PAUSE", "sometimes"),
        ("DCR_CACHES", "maybe"),
        ("DCR_STAGE_CAP", "much"),
        ("DCR_STAGE_CAP", "inf"),
        ("DCR_LOADED_CAP", "nan"),
        ("DCR_WATCHDOG", "inf"),
        ("DCR_STAGE_CAP", "10"),
        ("DCR_LOADED_CAP", "-1"),
        ("DCR_BACKGROUND_CPUS", "0-x"),
        ("DCR_WATCHDOG", "-1"),
        ("DCR_WATCHDOG", "nan"),
        ("DCR_GATE", "open"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UnsupportedVllm, match=name):
        Settings.read({name: value})


def test_variables_are_read_as_documented() -> None:
    assert Settings.read({}) == Settings()
    read = Settings.read(
        {
            "DCR_SOCKET": "/run/dcr/vllm.sock",
            "DCR_PAUSE": "wait",
            "DCR_CACHES": "keep",
            "DCR_STAGE_CAP": "1048576",
            "DCR_LOADED_CAP": "0",
            "DCR_BACKGROUND_CPUS": "8,0-2",
            "DCR_GATE": "health",
            "DCR_WATCHDOG": "0",
        }
    )
    assert read == Settings(Path("/run/dcr/vllm.sock"), "wait", "keep", 1 << 20, 0, (0, 1, 2, 8), 0.0, "health")


def test_without_a_socket_the_plugin_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("vllm.v1.engine.core")
    monkeypatch.delenv("DCR_SOCKET", raising=False)
    from dcr_daemon.vllm_plugin import register

    register()
    assert not hasattr(core.EngineCore, hooks.METHOD)


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_tells_the_workers_to_write_is_noticed_at_once(fails: bool) -> None:
    looks: list[str] = []

    def collective_rpc(method: str, **options: Any) -> str:
        if fails:
            raise RuntimeError("half done")
        return f"{method} {options}"

    core = SimpleNamespace(state=SimpleNamespace(poll_external_writes=lambda: looks.append("looked")))
    call = hooks._detecting_writes(collective_rpc, core)  # type: ignore[arg-type]
    for method in ("reload_weights", "sleep", "execute_model", "dcr_call"):
        if fails:
            with pytest.raises(RuntimeError, match="half done"):
                call(method, args=())
        else:
            assert call(method, args=()) == f"{method} {{'args': ()}}"
    assert looks == ["looked", "looked"]
