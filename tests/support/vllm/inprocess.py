"""A vLLM model in this very process, on CPU, loaded by vLLM's own loader; no engine, no worker, no server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS=""
)


def load(path: Path, **options: Any) -> tuple[torch.nn.Module, Any]:
    """The model of a checkpoint directory with the CPU rig in place, and its `VllmConfig`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from dcr_daemon.vllm_plugin import cpu_rig
    from dcr_daemon.vllm_plugin.loader import derived

    config = _config(path, options)
    cpu_rig.install()
    derived.install()
    _distributed()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def unloaded(path: Path, **options: Any) -> torch.nn.Module:
    """The model of a directory that has a configuration but no weights, before anything is loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = _config(path, options)
    _distributed()
    with set_current_vllm_config(config):
        return initialize_model(config)


def _config(path: Path, options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    arguments = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, **options}
    return EngineArgs(model=str(path), **arguments).create_engine_config()


def _distributed() -> None:
    """One rank, once per process; without a model vLLM makes every group that any model may want."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if model_parallel_is_initialized():
        return
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """What is loaded meanwhile is the share of one of `size` tensor-parallel ranks. There are no others: it cannot
    compute."""
    from vllm.distributed.parallel_state import get_tp_group

    _distributed()
    with mock.patch.multiple(get_tp_group(), world_size=size, rank_in_group=rank):
        yield


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert one.keys() == two.keys()

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return [name for name in one if not torch.equal(bits(one[name]), bits(two[name]))]
