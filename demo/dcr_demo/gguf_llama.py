"""Read a llama-family GGUF as Hugging Face Llama tensors, configuration and tokenizer.

Covers what SmolLM2's GGUF uses: any block format the `gguf` package can dequantise, grouped-query attention,
tied embeddings and a GPT-2 style byte-level BPE. Weights come out in BF16, rounded once from the dequantised
float32.

transformers reads the same file (`gguf_file=`), and its BF16 weights of SmolLM2 are equal bit for bit; but it needs
accelerate for that, which nothing else here does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.errors import Incompatible

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Llama:
    """An opened GGUF; `fields` are its metadata as plain values."""

    reader: Any
    fields: dict[str, Any]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, BF16 torch tensor), in the file's order, one dequantised at a time."""
        import torch
        from gguf import dequantize

        heads = {
            "attn_q": int(self.fields["llama.attention.head_count"]),
            "attn_k": int(self.fields["llama.attention.head_count_kv"]),
        }
        for tensor in self.reader.tensors:
            stem = tensor.name.removesuffix(".weight")
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            part = stem.rpartition(".")[2]
            if part in heads:
                values = rotate_halves(values, heads[part])
            yield hf_name(stem), torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)

    def write_side_files(self, out: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer into `out`."""
        config = self._config()
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (out / "generation_config.json").write_text(json.dumps(ids, indent=2))
        self._tokenizer().save_pretrained(out)

    def _config(self) -> dict[str, Any]:
        get = self.fields
        heads = int(get["llama.attention.head_count"])
        hidden = int(get["llama.embedding_length"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": int(get["llama.feed_forward_length"]),
            "num_hidden_layers": int(get["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(get["llama.attention.head_count_kv"]),
            "head_dim": hidden // heads,
            "max_position_embeddings": int(get["llama.context_length"]),
            "rms_norm_eps": float(np.float32(get["llama.attention.layer_norm_rms_epsilon"])),
            "rope_theta": float(get["llama.rope.freq_base"]),
            "tie_word_embeddings": not any(t.name == "output.weight" for t in self.reader.tensors),
            "vocab_size": int(get["llama.vocab_size"]),
            "bos_token_id": int(get["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(get["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(get["tokenizer.ggml.padding_token_id"]),
        }

    def _tokenizer(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens = list(self.fields["tokenizer.ggml.tokens"])
        kinds = list(self.fields["tokenizer.ggml.token_type"])
        merges = [tuple(line.split(" ", 1)) for line in self.fields["tokenizer.ggml.merges"]]
        core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        # The "smollm" pre-tokenizer: digits one by one, then GPT-2's byte-level split.
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        core.decoder = decoders.ByteLevel()
        control = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 3]
        core.add_special_tokens(control)
        special = {
            f"{role}_token": tokens[int(self.fields[f"tokenizer.ggml.{key}_token_id"])]
            for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        wrapped = PreTrainedTokenizerFast(tokenizer_object=core, **special)
        wrapped.chat_template = self.fields["tokenizer.chat_template"]
        return wrapped


def hf_name(stem: str) -> str:
    """Hugging Face name of a GGUF tensor (without `.weight`). Raises `Incompatible` for a tensor unknown here."""
    if stem in _MODEL:
        return f"{_MODEL[stem]}.weight"
    match stem.split("."):
        case ["blk", layer, part] if part in _LAYER:
            return f"model.layers.{int(layer)}.{_LAYER[part]}.weight"
    raise Incompatible(f"the GGUF holds a tensor that is not part of a plain llama: {stem}")


def rotate_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k: it interleaves the two halves that Hugging Face rotates as blocks."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_llama(path: Path) -> Llama:
    """Open a GGUF. Raises `Incompatible` unless its architecture is llama and its tokenizer byte-level BPE."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.model"))
    if kind != ("llama", "gpt2"):
        raise Incompatible(f"{path.name} is {kind[0]} with a {kind[1]} tokenizer", hint="only llama with gpt2 is read")
    return Llama(reader, fields)
