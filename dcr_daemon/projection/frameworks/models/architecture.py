"""A model as its blocks, from which both the trainer's parameters and the checkpoint's tensors follow.

Plain records, read from a `config.json` by `families.py`. A block has sizes only; frameworks split and name it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention. `gate`: each head's query comes with an output gate (Qwen3-Next)."""

    heads: int
    groups: int
    head: int  #: elements of one head
    bias: bool = False  #: of q, k and v
    out_bias: bool = False
    norms: bool = False  #: of the head's query and key
    gate: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek). `q_rank` is `None` where the query is not compressed."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba2: in_proj is [z | x | B | C | dt], conv1d is [x | B | C]."""

    heads: int
    head: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head

    @property
    def state_rows(self) -> int:
        """Rows of B, and of C."""
        return self.groups * self.state


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta net (Qwen3-Next), grouped by key head in the checkpoint."""

    key_heads: int
    value_heads: int
    key: int  #: elements of one key head
    value: int
    kernel: int


@dataclass(frozen=True, slots=True)
class Mlp:
    width: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. `stacked`: one canonical tensor holds all of a layer's experts, transposed, with gate and
    up interleaved (gpt-oss)."""

    count: int
    width: int
    shared: int = 0  #: width of the shared expert, 0 for none
    shared_gate: bool = False
    gated: bool = True
    stacked: bool = False
    correction: bool = False  #: a score correction bias per expert
    router_bias: bool = False
    latent: int = 0  #: size in which the experts work, 0 for the model's own


Mixer = Attention | Latent | Mamba | DeltaNet
Feed = Mlp | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """A hybrid's layer has one of the two, any other both."""

    mixer: Mixer | None
    feed: Feed | None


@dataclass(frozen=True, slots=True)
class Names:
    """The names in the family's checkpoints. `{}` is the expert's number."""

    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    norm: str = "model.norm.weight"
    layers: str = "model.layers."
    mixer: str = "self_attn."
    mixer_norm: str = "input_layernorm.weight"
    feed: str = "mlp."
    feed_norm: str = "post_attention_layernorm.weight"
    router: str = "mlp.gate"
    experts: str = "mlp.experts."
    shared: str = "mlp.shared_experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Multi-token prediction: each module is the layers of `layers` in a row, and `layers` is written once per module.

    `numbered_on`: its layers go on counting after the model's own (DeepSeek, GLM), with copies of embedding and head;
    otherwise they are `mtp.layers.*` (Nemotron).
    """

    modules: int
    layers: tuple[Layer, ...]
    numbered_on: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    family: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool = False
    dtype: str = "BF16"
    names: Names = field(default_factory=Names)
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()  #: what a reader of the plan must know
