"""How much memory a worker reserves for a transaction, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.vllm_plugin import settings
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.worker import reserve
from dcr_daemon.vllm_plugin.worker.reserve import TransactionMemory, weight_bytes

META = torch.device("meta")  # a device whose memory takes none
CHANGED = 0.015


@pytest.mark.parametrize(
    ("parameters", "ranks"),
    [(0.6e9, 1), (8.2e9, 1), (30.5e9, 1), (235e9, 8), (357e9, 8), (1026e9, 16)],
    ids=["0.6B", "8B", "30B on one", "235B on eight", "355B on eight", "1T on sixteen"],
)
def test_a_change_of_one_and_a_half_percent_fits_by_default(parameters: float, ranks: int) -> None:
    elements = int(parameters / ranks)
    cap = settings.stage_cap(None, 2 * elements)
    assert cap >= 12 * CHANGED * elements, "on the host: two places and two values"
    assert DeviceArena(cap, META).size >= 8 * CHANGED * elements, "on a device: one place and two values"


def test_a_small_model_reserves_no_more_than_any_change_of_it_takes() -> None:
    assert settings.stage_cap(None, 1 << 20) < 16 << 20
    assert settings.stage_cap(None, 1 << 20) >= 10 << 20, "every element of width 1: two places and two values"


def test_a_number_of_bytes_is_taken_as_it_is() -> None:
    assert settings.stage_cap(12345678, 1 << 40) == 12345678
    assert settings.computed_cap(0, 1 << 40) == 0


@pytest.mark.parametrize(
    ("model", "routers"),
    [(716e9, 89 * 160 * 5120 * 2), (460e9, 62 * 256 * 3072 * 2), (213e9, 45 * 128 * 4096 * 2)],
    ids=["GLM-4.5 355B", "MiniMax-M2", "GLM-4.5-Air"],
)
def test_the_bf16_routers_of_large_mixtures_are_below_the_default(model: float, routers: int) -> None:
    assert settings.computed_cap(None, int(model)) >= routers


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_SOCKET", "/run/dcr/vllm.sock")
    monkeypatch.delenv("DCR_STAGE_CAP", raising=False)


def worker(device: torch.device) -> SimpleNamespace:
    model = torch.nn.Linear(1 << 10, 1 << 10, device=META, dtype=torch.bfloat16)
    return SimpleNamespace(device=device, model_runner=SimpleNamespace(get_model=lambda: model))


def test_a_worker_on_a_device_reserves_once_and_the_session_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "weight_bytes", lambda model: 1 << 30)
    one = worker(META)
    reserve.reserve(one)
    arena = one.__dict__[reserve.ATTRIBUTE]
    reserve.reserve(one)
    assert one.__dict__[reserve.ATTRIBUTE] is arena
    memory = TransactionMemory(one.model_runner.get_model(), META, arena)
    assert memory.reserve_device(None) is arena
    other = memory.reserve_device(1 << 20)
    assert other is not None
    assert other.cap == 1 << 20


def test_without_the_plugin_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCR_SOCKET")
    one = worker(META)
    reserve.reserve(one)
    assert reserve.ATTRIBUTE not in one.__dict__


def test_a_worker_on_the_host_reserves_no_device_memory() -> None:
    one = worker(torch.device("cpu"))
    reserve.reserve(one)
    assert reserve.ATTRIBUTE not in one.__dict__
    assert TransactionMemory(torch.nn.Linear(2, 2), torch.device("cpu")).reserve_device(None) is None


def test_a_full_device_at_attach_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(cap: int, device: torch.device) -> DeviceArena:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reserve, "DeviceArena", full)
    with pytest.raises(ResourceExhausted, match="CUDA out of memory") as caught:
        TransactionMemory(torch.nn.Linear(2, 2), META).reserve_device(1 << 20)
    assert "DCR_STAGE_CAP" in caught.value.hint


def test_shared_weights_count_once() -> None:
    one = torch.nn.Linear(8, 8, bias=False)
    two = torch.nn.Linear(8, 8, bias=False)
    two.weight = torch.nn.Parameter(one.weight.data[:4], requires_grad=False)
    assert weight_bytes(torch.nn.ModuleList([one, two])) == 8 * 8 * 4


@pytest.mark.vllm
def test_memory_is_reserved_before_vllm_measures_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    order = []
    monkeypatch.setattr(Worker, reserve.MEASURE, lambda self: order.append("measured"))
    monkeypatch.setattr(reserve, "reserve", lambda one: order.append("reserved"))
    of_cpu = CPUWorker.determine_available_memory
    reserve.install()
    reserve.install()
    Worker.determine_available_memory(object())
    assert order == ["reserved", "measured"]
    assert CPUWorker.determine_available_memory is of_cpu
