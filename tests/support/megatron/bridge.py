"""Megatron-Bridge's own mappings, from a checkout that MEGATRON_BRIDGE names.

Bridge's packages import Transformer Engine on the way. Here they are entered past their `__init__`, and what only
serves to build or load models is a stand-in; the mappings run as they are.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class _Anything(type):
    """A class that has every attribute and can be called, subscripted, decorated with and inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: lambda given: given

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _StandIn(metaclass=_Anything):
    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


_REAL = ("conversion.param_mapping", "conversion.mapping_registry", "conversion.quant_mapping", "conversion.utils",
         "deepseek.common", "utils.common_utils")  # fmt: skip


class _Finder:
    """Bridge's packages without their `__init__`; its mappings and family files as they are; stand-ins for the rest."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("megatron.training"):
            return importlib.machinery.ModuleSpec(name, _Empty(), is_package=True)
        if not name.startswith("megatron.bridge"):
            return None
        at = self.source.joinpath(*name.split("."))
        if at.is_dir():
            spec = importlib.machinery.ModuleSpec(name, _Empty(), is_package=True)
            spec.submodule_search_locations = [str(at)]
            return spec
        if name.endswith((*_REAL, "_bridge")) and not name.endswith("model_bridge"):
            return importlib.util.spec_from_file_location(name, at.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, _Empty(), is_package=True)


class _Empty:
    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def prepare() -> None:
    """Make Megatron-LM's checkout (without one: what is installed) and Bridge's importable in this process."""
    if "MEGATRON_LM" in os.environ:
        sys.path[:0] = [os.environ["MEGATRON_LM"]]
    if not hasattr(typing, "override"):
        typing.override = lambda given: given  # type: ignore[attr-defined]
    if "MEGATRON_BRIDGE" in os.environ:
        sys.meta_path.insert(0, _Finder(Path(os.environ["MEGATRON_BRIDGE"]) / "src"))  # type: ignore[arg-type]


BRIDGES = {
    "llama": "llama.llama_bridge.LlamaBridge",
    "qwen2": "qwen.qwen2_bridge.Qwen2Bridge",
    "qwen3": "qwen.qwen3_bridge.Qwen3Bridge",
    "qwen3_moe": "qwen.qwen3_moe_bridge.Qwen3MoEBridge",
    "deepseek_v3": "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge",
    "glm4_moe": "glm.glm45_bridge.GLM45Bridge",
}


def registry(fields: dict[str, Any], *, staged: bool = True) -> Any:
    """The mappings of a family; not `staged`: each stage exports what it has, and waits for no other."""
    module, _, name = BRIDGES[fields["model_type"]].rpartition(".")
    mappings = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    if not staged:
        mappings.MegatronParamMapping.pp_size = 1
    bridge = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), name)()
    bridge.hf_config = types.SimpleNamespace(num_nextn_predict_layers=0, **fields)
    bridge.hf_pretrained = types.SimpleNamespace(config=bridge.hf_config)
    return bridge.mapping_registry()


#: Names in Megatron's own layers → in Transformer Engine's, which are all that some bridges know.
_ENGINE = (
    (r"input_layernorm\.weight$", "self_attention.linear_qkv.layer_norm_weight"),
    (r"pre_mlp_layernorm\.weight$", "mlp.linear_fc1.layer_norm_weight"),
    (r"\.(q|kv)_layernorm\.weight$", r".linear_\1_up_proj.layer_norm_weight"),
    (r"\.local_experts\.(\d+)\.(\w+)\.weight$", r".\2.weight\1"),
)


def global_name(model: Any, name: str, fields: dict[str, Any], degrees: dict[str, int], rank: int) -> str:
    """A parameter's name in the whole model. The library itself says which layer of the model one is."""
    experts = fields.get("num_experts") or fields.get("n_routed_experts") or 0
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.get_submodule(".".join(parts[:3])).layer_number - 1)
    if "local_experts" in parts:
        at, ways = parts.index("local_experts") + 1, degrees.get("ep", 1)
        parts[at] = str(int(parts[at]) + rank // degrees.get("etp", 1) % ways * (experts // ways))
    return ".".join(parts)


def lookup(known: Any, name: str) -> Any:
    """The mapping of a parameter, by its name in the whole model."""
    spellings = [name, *(re.sub(ours, engine, name) for ours, engine in _ENGINE)]
    found = next(filter(None, map(known.megatron_to_hf_lookup, spellings)), None)
    if found is None:
        raise SystemExit(f"{name}: Megatron-Bridge has no mapping for it")
    return found


class Conversion:
    """Both ways between this rank's chunks and whole canonical tensors, by Bridge's mappings; collective."""

    def __init__(self, chunks: list[Any], fields: dict[str, Any], degrees: dict[str, int], rank: int) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        self._fields, self._vocabulary = fields, fields["vocab_size"]
        self._registry = registry(fields)
        self._here: dict[str, tuple[Any, str, str]] = {}
        self._tied: list[Any] = []
        for model in chunks:
            for name in tensors_of(model):
                if fields.get("tie_word_embeddings") and name == "output_layer.weight":
                    self._tied.append(tensors_of(model)[name])  # a later stage's copy
                    continue
                key = global_name(model, name, fields, degrees | {"ep": 1}, rank)
                self._here[key] = model, name, global_name(model, name, fields, degrees, rank)
        group = parallel_state.get_pipeline_model_parallel_group()
        keys: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(keys, {key: one[2] for key, one in self._here.items()}, group=group)
        self._keys_of: dict[str, str] = {}
        self._keys = {key: name for stage in keys for key, name in stage.items()}

    def export(self) -> Iterator[tuple[str, Any]]:
        """Every canonical tensor, whole, on every rank."""
        for key in self._keys:
            yield from self._exported(key).items()

    def export_of(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Some canonical tensors, in this order: the hook that a training script gives to a publisher."""
        if not self._keys_of:
            self._keys_of = {name: key for key in self._keys for name in self._exported(key)}
        for name in names:
            yield name, self._exported(self._keys_of[name])[name]

    def _exported(self, key: str) -> dict[str, Any]:
        model, local, _ = self._here.get(key, (None, "", ""))
        tensor = tensors_of(model)[local].detach() if model else None
        module = model.get_submodule(local.rpartition(".")[0]) if model else None
        found = lookup(self._registry, self._keys[key]).megatron_to_hf(tensor, module)
        trimmed = ("embed_tokens.weight", "lm_head.weight")
        return {n: value[: self._vocabulary] if n.endswith(trimmed) else value for n, value in found.items()}

    def load(self, weights: Mapping[str, Any]) -> None:
        """Fill the chunks with canonical tensors; the padding of the vocabulary with zeros."""
        import torch

        known = registry(self._fields)  # mappings remember, and stages must remember alike when they export
        for model, local, name in self._here.values():
            module, tensor = model.get_submodule(local.rpartition(".")[0]), tensors_of(model)[local]
            mapping = lookup(known, name)
            mapping.megatron_param = name  # it looks for the parameter by this name, which may be Transformer Engine's
            tensor.data.copy_(self._loaded(mapping, tensor, module, weights))
        for tensor in self._tied:
            module = torch.nn.Module()
            module.weight, module.tensor_model_parallel, module.partition_dim = tensor, True, 0
            mapping = lookup(registry(self._fields), "embedding.word_embeddings.weight")
            tensor.data.copy_(self._loaded(mapping, tensor, module, weights))

    def _loaded(self, mapping: Any, tensor: Any, module: Any, weights: Mapping[str, Any]) -> Any:
        import torch

        wanted = mapping.hf_param
        if not isinstance(wanted, str):
            return mapping.hf_to_megatron({key: weights[name] for key, name in wanted.items()}, module)
        whole = weights[wanted]
        if whole.shape[:1] == (self._vocabulary,):
            whole = torch.nn.functional.pad(whole, (0, 0, 0, tensor.shape[0] * mapping.tp_size - self._vocabulary))
        return mapping.hf_to_megatron(whole, module)


def tensors_of(model: Any) -> dict[str, Any]:
    """What a checkpoint has of a chunk: its parameters, and the one kind of buffer."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    return dict(model.named_parameters()) | buffers
