"""Writes golden/*.json: what Megatron's own code does with index tensors. `make oracle-megatron`

    models   real `GPTModel`s of megatron-core, built by real processes over gloo; every parameter is filled with
             numbers that say rank and place, and exported by Megatron-Bridge's own mappings. Where each number arrives
             is the map
    forms    the mappings of blocks that need a GPU to be built (Mamba, delta nets, stacked experts, output gates), fed
             with bare index tensors

Nothing of dcr takes part but `fit`, which turns number pairs into regions.

    MEGATRON_LM=… MEGATRON_BRIDGE=… PYTHONPATH=tests python tests/projection/frameworks/oracle_megatron.py \
        [--out DIRECTORY] [CASE …]

The two are checkouts of NVIDIA/Megatron-LM (without it: the installed megatron-core) and NVIDIA-NeMo/Megatron-Bridge
(without it: inventories of models alone). How both run without Transformer Engine is said in tests/support/megatron.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from support.megatron.bridge import global_name, lookup, prepare, registry, tensors_of
from support.megatron.cases import LATENT, MOE, PLAIN, ROUTED
from support.megatron.models import chunks_of, groups, world_of

GOLDEN = Path(__file__).parent / "golden"
STRIDE = 1 << 40  #: a number is rank · STRIDE + place

#: name: (config.json, degrees). The world is tp · dp · pp.
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama-tp4": ({"model_type": "llama"} | PLAIN, {"tp": 4}),
    "llama-tp4-g2": ({"model_type": "llama"} | PLAIN | {"num_key_value_heads": 2}, {"tp": 4}),
    "qwen3-tied-tp2": ({"model_type": "qwen3", "tie_word_embeddings": True} | PLAIN, {"tp": 2}),
    "qwen2-tp2": ({"model_type": "qwen2"} | PLAIN, {"tp": 2}),
    "qwen3_moe-tp2-ep2": ({"model_type": "qwen3_moe"} | PLAIN | MOE, {"tp": 2, "ep": 2}),
    "qwen3_moe-tp4-ep2-etp2": ({"model_type": "qwen3_moe"} | PLAIN | MOE, {"tp": 4, "ep": 2, "etp": 2}),
    "qwen3_moe-tp1-ep4-dp4": ({"model_type": "qwen3_moe"} | PLAIN | MOE, {"ep": 4, "dp": 4}),
    "deepseek_v3-tp2-ep2": ({"model_type": "deepseek_v3"} | PLAIN | ROUTED | LATENT, {"tp": 2, "ep": 2}),
    "glm4_moe-tp2-ep2": (
        {"model_type": "glm4_moe", "attention_bias": True} | PLAIN | ROUTED, {"tp": 2, "ep": 2}
    ),
    "glm4_moe-norms-tp4-g2": (
        {"model_type": "glm4_moe", "use_qk_norm": True} | PLAIN | ROUTED | {"num_key_value_heads": 2},
        {"tp": 4, "ep": 4},
    ),
    "llama-tp2-pp2-vpp2": ({"model_type": "llama"} | PLAIN | {"num_hidden_layers": 4}, {"tp": 2, "pp": 2, "vpp": 2}),
    "qwen3-tied-pp2": ({"model_type": "qwen3", "tie_word_embeddings": True} | PLAIN, {"pp": 2}),
    "qwen3_moe-pp2-ep2-dp2": ({"model_type": "qwen3_moe"} | PLAIN | MOE, {"pp": 2, "ep": 2, "dp": 2}),
}  # fmt: skip

#: name: (mapping class, its canonical names, configuration, local shape on a rank by ranks, ranks)
FORMS: dict[str, dict[str, Any]] = {
    f"{name}-tp{ranks}": form | {"ranks": ranks}
    for name, form in {
        "mamba-in": {"class": "MambaInProjMapping", "mamba": [8, 6, 4, 5], "tail": [10]},
        "mamba-conv": {"class": "MambaConv1dMapping", "mamba": [8, 6, 4, 5], "tail": [1, 4]},
        "mamba-conv-bias": {"class": "MambaConv1dMapping", "mamba": [8, 6, 4, 5], "tail": []},
        "delta-in": {"class": "GDNLinearMapping", "delta": [4, 8, 3, 5], "tail": [10]},
        "delta-conv": {"class": "GDNConv1dMapping", "delta": [4, 8, 3, 5], "tail": [1, 4]},
        "gate": {"class": "QKVMapping", "attention": [8, 4, 4], "gate": True, "tail": [10]},
        "groups": {"class": "QKVMapping", "attention": [8, 2, 4], "gate": False, "tail": [10]},
        "groups-bias": {"class": "QKVMapping", "attention": [8, 2, 4], "gate": False, "tail": []},
        "stacked-in": {"class": "GPTOSSMLPGateUpProjMapping", "expert": [6, 10]},
        "stacked-in-bias": {"class": "GPTOSSMLPGateUpProjMapping", "expert": [6, 1]},
        "stacked-out": {"class": "GPTOSSMLPDownProjMapping", "expert": [6, 10]},
        "zero-centred": {"class": "RMSNorm2ZeroCenteredRMSNormMapping", "norm": 6},
    }.items()
    for ranks in ((1,) if "stacked" in name or "zero" in name else (1, 2, 4))
}


# --- real models ---


def _export_model(case: str, rank: int) -> dict[str, Any]:
    """Runs on every rank: {"inventory": this rank's parameters, "export": canonical name -> numbers}."""
    import torch

    fields, degrees = MODELS[case]
    chunks = chunks_of(fields, degrees)
    known = registry(fields, staged=False) if "MEGATRON_BRIDGE" in os.environ else None
    inventory, exported = [], {}
    for number, model in enumerate(chunks):
        for name, tensor in tensors_of(model).items():
            called = f"{number}.{name}" if len(chunks) > 1 else name
            inventory.append(
                {
                    "name": called,
                    "shape": list(tensor.shape),
                    "tensor_model_parallel": bool(getattr(tensor, "tensor_model_parallel", False)),
                    "partition_dim": getattr(tensor, "partition_dim", -1),
                    "expert": not getattr(tensor, "allreduce", True),
                }
            )
            repeated = fields.get("tie_word_embeddings") and name == "output_layer.weight"
            if known is None or repeated:
                continue
            module = model.get_submodule(name.rpartition(".")[0])
            mapping = lookup(known, global_name(model, name, fields, degrees, rank))
            numbers = (torch.arange(tensor.numel(), dtype=torch.int64) + rank * STRIDE).view(tensor.shape)
            for canonical, value in mapping.megatron_to_hf(numbers, module).items():
                if canonical.endswith(("embed_tokens.weight", "lm_head.weight")):
                    value = value[: fields["vocab_size"]]
                exported[canonical] = [called, list(value.shape), value.reshape(-1).tolist()]
    return {"inventory": inventory, "export": exported}


# --- forms ---


def _export_form(case: str, rank: int) -> dict[str, Any]:
    import torch
    from megatron.core import mpu

    form, ranks = FORMS[case], FORMS[case]["ranks"]
    source = {"GPTOSS": "gpt_oss.gpt_oss_bridge", "RMSNorm2": "conversion.param_mapping"}
    module = next((m for start, m in source.items() if form["class"].startswith(start)), "conversion.param_mapping")
    mapping_class = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), form["class"])
    config, rows, names = types.SimpleNamespace(), 0, {"hf_param": "c"}
    tail = form.get("tail", [])
    if "mamba" in form:
        heads, head, groups, state = form["mamba"]
        config.mamba_num_heads, config.mamba_head_dim = heads, head
        config.mamba_num_groups, config.mamba_state_dim = groups, state
        rows = heads * head + 2 * groups * state + (heads * head + heads) * (form["class"] == "MambaInProjMapping")
    elif "delta" in form:
        keys, values, key, value = form["delta"]
        config.linear_num_key_heads, config.linear_num_value_heads = keys, values
        config.linear_key_head_dim, config.linear_value_head_dim = key, value
        rows = 2 * keys * key + values * value
        if form["class"] == "GDNLinearMapping":
            rows, names = rows + values * value + 2 * values, {"qkvz": "qkvz", "ba": "ba"}
    elif "attention" in form:
        config.num_attention_heads, config.num_query_groups, config.kv_channels = form["attention"]
        config.attention_output_gate = form["gate"]
        rows = (config.num_attention_heads * (1 + form["gate"]) + 2 * config.num_query_groups) * config.kv_channels
        names = {"q": "q", "k": "k", "v": "v"}
    elif "expert" in form:
        width, hidden = form["expert"]
        into = form["class"] == "GPTOSSMLPGateUpProjMapping"
        rows, tail = (2 * width, [hidden]) if into else (hidden, [width])
        tail = [] if hidden == 1 else tail
        names = {"hf_param": "c_bias" if hidden == 1 else "c"}
    else:
        rows = form["norm"]
    config.hidden_size = tail[0] if len(tail) == 1 else 1
    shape = [rows // ranks, *tail]
    expert = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
    mapping = mapping_class(expert if "expert" in form else "m", **names)
    holder = torch.nn.Module()
    holder.config = config
    numbers = (torch.arange(rows // ranks * math.prod(tail), dtype=torch.int64) + rank * STRIDE).view(shape)
    holder.weight = types.SimpleNamespace(tensor_model_parallel=True, partition_dim=0)
    if hasattr(mapping, "_tp_mapping") and type(mapping._tp_mapping).__name__ == "AutoMapping":
        parallel = "column" if "expert" not in form else "replicated"
        mapping._tp_mapping = mapping._tp_mapping._get_or_create_mapping(parallel)
    elif type(mapping).__mro__[1].__name__ == "AutoMapping" or hasattr(mapping, "_get_or_create_mapping"):
        mapping._detected_type = "replicated"
        mapping._mapping = mapping._get_or_create_mapping("replicated")
    assert mpu.get_tensor_model_parallel_world_size() == ranks
    added = {name: t.unique() for name, t in mapping.megatron_to_hf(torch.zeros_like(numbers), holder).items()}
    exported = {name: t - added[name] for name, t in mapping.megatron_to_hf(numbers, holder).items()}
    return {
        "shape": shape,
        "added": int(next(iter(added.values()))),
        "export": {name: ["m", list(t.shape), t.reshape(-1).tolist()] for name, t in exported.items()},
    }


# --- processes ---


def _degrees(case: str) -> dict[str, int]:
    return MODELS[case][1] if case in MODELS else {"tp": FORMS[case]["ranks"]}


def _worker(cases: list[str]) -> None:
    """All of `cases` in one process group: they have the same degrees."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    prepare()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    groups(_degrees(cases[0]))
    for case in cases:
        found = _export_model(case, rank) if case in MODELS else _export_form(case, rank)
        Path(os.environ["ORACLE_OUT"], f"{case}.{rank}.json").write_text(json.dumps(found))


def _run(cases: list[str]) -> dict[str, list[dict[str, Any]]]:
    degrees = _degrees(cases[0])
    world = world_of(degrees)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "ORACLE_OUT": out}
        line = [sys.executable, "-W", "ignore", __file__, "--worker", *cases]
        errors = [Path(out, f"{rank}.err") for rank in range(world)]
        ranks = [
            subprocess.Popen(line, env=os.environ | settings | {"RANK": str(rank)}, stderr=errors[rank].open("w"))
            for rank in range(world)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"{cases}: {errors[codes.index(max(codes))].read_text()[-4000:]}")
        return {
            case: [json.loads(Path(out, f"{case}.{rank}.json").read_text()) for rank in range(world)] for case in cases
        }


def _regions(found: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Where the numbers of each rank's parameters arrived, over the exports of all ranks."""
    import numpy as np

    from dcr_daemon.canonical.fit import fit

    table: dict[str, list[Any]] = {}
    shapes: dict[str, list[int]] = {}
    seen: dict[str, Any] = {}
    for one in found:
        for canonical, (parameter, shape, numbers) in one["export"].items():
            if canonical not in seen:
                seen[canonical] = parameter, np.array(numbers, np.int64)
                shapes[canonical] = shape
    for canonical, (parameter, numbers) in sorted(seen.items()):
        for rank in np.unique(numbers // STRIDE).tolist():
            at = np.flatnonzero(numbers // STRIDE == rank)
            for r in fit(canonical, numbers[at] % STRIDE, at):
                row = [rank, parameter, r.name, list(r.shape), r.src, list(r.src_strides), r.dst, list(r.dst_strides)]
                table.setdefault(canonical, []).append(row)
    return {"shapes": shapes, "regions": [row for rows in table.values() for row in rows]}  # type: ignore[dict-item]


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--worker"]:
        _worker(arguments[1:])
        return
    out = GOLDEN
    if arguments[:1] == ["--out"]:
        out, arguments = Path(arguments[1]), arguments[2:]
    elif "MEGATRON_BRIDGE" not in os.environ:
        raise SystemExit("golden tables need MEGATRON_BRIDGE, a checkout of NVIDIA-NeMo/Megatron-Bridge")
    prepare()
    from megatron.core import __version__ as core

    out.mkdir(exist_ok=True)
    origin = {"megatron-core": core} | {
        name: _commit(variable)
        for name, variable in (("Megatron-LM", "MEGATRON_LM"), ("Megatron-Bridge", "MEGATRON_BRIDGE"))
    }
    batches: dict[str, list[str]] = {}
    for case in arguments or [*MODELS, *FORMS]:
        batches.setdefault(str(sorted(_degrees(case).items())), []).append(case)
    for cases in batches.values():
        for case, found in _run(cases).items():
            document: dict[str, Any] = {"written by": "tests/projection/frameworks/oracle_megatron.py", "from": origin}
            if case in MODELS:
                document |= {"config": MODELS[case][0], "degrees": MODELS[case][1]}
                document |= {"inventory": [one["inventory"] for one in found]}
            else:
                document |= {"form": FORMS[case], "shape": found[0]["shape"], "added": found[0]["added"]}
            document |= _regions(found)
            (out / f"{case}.json").write_text(_text(document))
            print(f"{case}: {len(document['regions'])} regions of {len(document['shapes'])} tensors", flush=True)


def _text(document: dict[str, Any]) -> str:
    """JSON with a line for each top-level entry's items, so that a change is a small diff."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = ",\n".join("    " + json.dumps(row) for row in value)
            parts.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _commit(variable: str) -> str:
    if variable not in os.environ:
        return ""
    done = subprocess.run(
        ["git", "-C", os.environ[variable], "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or os.environ.get(f"{variable}_COMMIT", "")


if __name__ == "__main__":
    main(sys.argv[1:])
