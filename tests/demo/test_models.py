"""The demo's models are complete checkpoints that the field's own loaders take, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file

from dcr_daemon.errors import Incompatible, UsageError
from dcr_demo import models
from dcr_demo.gguf_llama import hf_name, rotate_halves


def weights(model: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for file in sorted(model.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(("kind", "tensors"), [("dense", 25), ("tied", 24), ("moe", 69)])
def test_each_kind_is_a_bf16_checkpoint_with_canonical_names(kind: models.Kind, tensors: int, tmp_path: Path) -> None:
    import torch

    found = weights(models.write_tiny(tmp_path / kind, kind=kind, seed=1))
    assert len(found) == tensors
    assert {t.dtype for t in found.values()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert ("lm_head.weight" in found) == (kind != "tied")
    assert any(".experts.7." in name for name in found) == (kind == "moe")


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(tmp_path: Path) -> None:
    import torch

    a, b, c = (weights(models.write_tiny(tmp_path / str(n), seed=s)) for n, s in enumerate((1, 1, 2)))
    assert all(torch.equal(a[name], b[name]) for name in a)  # type: ignore[arg-type]
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])  # type: ignore[arg-type]


def test_many_shards_have_an_index_that_agrees(tmp_path: Path) -> None:
    model = models.write_tiny(tmp_path / "m", shard_bytes=100_000)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) >= 8
    assert index == {name: f.name for f in model.glob("*.safetensors") for name in load_file(f)}


def test_an_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        models.write_tiny(tmp_path)


def test_every_token_has_a_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.write_tiny(tmp_path / "m"))
    ids = tokenizer("Grüße, 北京")["input_ids"]
    assert tokenizer.decode(ids) == "Grüße, 北京"
    assert all(tokenizer.convert_ids_to_tokens(i) for i in range(models.VOCABULARY))


def test_the_row_order_of_llama_cpp_is_undone() -> None:
    """Against the permutation that llama.cpp applies when it converts: two halves of each head, interleaved."""
    heads, width, columns = 3, 8, 5
    original = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
    converted = np.empty_like(original)
    for head in range(heads):
        for row in range(width):
            half, place = divmod(row, width // 2)
            converted[head * width + place * 2 + half] = original[head * width + row]
    assert np.array_equal(rotate_halves(converted, heads), original)


def test_a_tensor_that_is_no_llama_is_refused_by_name() -> None:
    assert hf_name("blk.7.ffn_down") == "model.layers.7.mlp.down_proj.weight"
    with pytest.raises(Incompatible, match=r"blk\.0\.ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps")


@pytest.mark.slow
def test_smollm2_speaks_english(tmp_path: Path) -> None:
    """A wrong dequantisation, rope order or tokenizer would give noise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = models.write_smollm2(tmp_path / "m")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert "Paris" in text
    assert len(list(path.glob("model-*.safetensors"))) >= 4
