"""`config.json` → `Architecture`, for the families whose Megatron layout is known in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dcr_daemon.errors import Incompatible, NotFound, UsageError
from dcr_daemon.projection.frameworks.models.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Feed,
    Latent,
    Layer,
    Mamba,
    Mlp,
    Names,
    Prediction,
)

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHIPPED = resources.files("dcr_daemon.projection.frameworks.models") / "configs"


@dataclass(frozen=True, slots=True)
class Fields:
    """A configuration's keys. What is needed and absent is an error that names it."""

    values: Mapping[str, Any]
    origin: str

    def count(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there, as a positive whole number."""
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
            said = "is missing" if value is None else f"cannot be {value!r}"
            raise UsageError(f"{self.origin}: {keys[0]} {said}", hint="CONFIG is a model's complete config.json")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def get(self, key: str) -> Any:
        return self.values.get(key)


def read_architecture(config: str | Path | Mapping[str, Any], *, prediction: bool | None = None) -> Architecture:
    """The architecture that a configuration describes.

    Args:
        config: a `config.json` or the directory that holds one, the name of a shipped configuration, or its content.
        prediction: whether the trained model has the multi-token prediction that the configuration speaks of; by
            default it does.

    Raises:
        NotFound: neither a file nor a shipped name.
        UsageError: it does not parse, or a field is missing.
        Incompatible: a family or a variant that is not known.
    """
    fields = _read(config)
    family = str(fields.get("model_type") or "")
    if family not in FAMILIES:
        raise Incompatible(
            f"{fields.origin}: model_type {family or 'is missing'} is not one that is known from a configuration alone"
            f" ({', '.join(sorted(FAMILIES))})",
            hint="a publisher in the training process maps any model that transformers can save",
        )
    architecture = FAMILIES[family](fields)
    if prediction is False:
        architecture = replace(architecture, prediction=None)
    elif prediction and architecture.prediction is None:
        raise UsageError(f"{fields.origin} has no multi-token prediction", hint="leave --mtp away")
    if fields.get("quantization_config"):
        note = "the checkpoint is quantised; what is planned is its unquantised export"
        architecture = replace(architecture, notes=(*architecture.notes, note))
    return architecture


def shipped() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(entry.name.removesuffix(".json") for entry in _SHIPPED.iterdir() if entry.name.endswith(".json"))


def _read(config: str | Path | Mapping[str, Any]) -> Fields:
    if isinstance(config, Mapping):
        values, origin = dict(config), "configuration"
    else:
        origin = str(config)
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        known = next((name for name in shipped() if name.lower() == origin.lower()), None)
        if not path.is_file() and known is None:
            raise NotFound(
                f"{origin} is neither a config.json nor a configuration that comes with dcr",
                hint=f"give a path, or one of: {', '.join(shipped())}",
            )
        try:
            text = path.read_text() if path.is_file() else (_SHIPPED / f"{known}.json").read_text()
            values = json.loads(text)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{origin} cannot be read as JSON: {error}", hint="CONFIG is a model's config.json"
            ) from error
        if not isinstance(values, dict):
            raise UsageError(f"{origin} is not a JSON object", hint="CONFIG is a model's config.json")
    return Fields(values, origin)


def _architecture(fields: Fields, layers: list[Layer], **more: Any) -> Architecture:
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise Incompatible(f"{fields.origin}: dtype {dtype}", hint=f"known: {', '.join(_DTYPES)}")
    return Architecture(
        family=str(fields.get("model_type")),
        hidden=fields.count("hidden_size"),
        vocabulary=fields.count("vocab_size"),
        layers=tuple(layers),
        tied=fields.flag("tie_word_embeddings"),
        dtype=_DTYPES[dtype],
        **more,
    )


def _attention(fields: Fields, **more: Any) -> Attention:
    heads = fields.count("num_attention_heads")
    groups = fields.count("num_key_value_heads", default=heads)
    head = fields.count("head_dim", default=fields.count("hidden_size") // heads)
    if heads % groups:
        raise UsageError(f"{fields.origin}: {heads} heads in {groups} groups", hint="CONFIG is a model's config.json")
    return Attention(heads, groups, head, **more)


def _dense(fields: Fields, **attention: Any) -> Architecture:
    bias = fields.flag("attention_bias")
    mixer = _attention(fields, **({"bias": bias, "out_bias": bias} | attention))
    feed = Mlp(fields.count("intermediate_size"), bias=fields.flag("mlp_bias"))
    return _architecture(fields, [Layer(mixer, feed)] * fields.count("num_hidden_layers"))


def _qwen3_moe(fields: Fields) -> Architecture:
    bias = fields.flag("attention_bias")
    mixer = _attention(fields, bias=bias, out_bias=bias, norms=True)
    experts = Experts(fields.count("num_experts"), fields.count("moe_intermediate_size"))
    return _architecture(fields, [Layer(mixer, feed) for feed in _sparse(fields, experts)])


def _sparse(fields: Fields, experts: Experts) -> list[Feed]:
    """Every `decoder_sparse_step`-th layer has experts, but for those that are named dense."""
    step, dense = fields.count("decoder_sparse_step", default=1), fields.get("mlp_only_layers") or []
    layers = fields.count("num_hidden_layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    mlp = None if all(sparse) else Mlp(fields.count("intermediate_size"))
    return [experts if here or mlp is None else mlp for here in sparse]


def _qwen3_next(fields: Fields) -> Architecture:
    full = _attention(fields, norms=True, gate=True)
    delta = DeltaNet(
        key_heads=fields.count("linear_num_key_heads", default=16),
        value_heads=fields.count("linear_num_value_heads", default=32),
        key=fields.count("linear_key_head_dim", default=128),
        value=fields.count("linear_value_head_dim", default=128),
        kernel=fields.count("linear_conv_kernel_dim", default=4),
    )
    experts = Experts(
        fields.count("num_experts"),
        fields.count("moe_intermediate_size"),
        shared=fields.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    every = fields.count("full_attention_interval", default=4)
    layers = fields.count("num_hidden_layers")
    kinds = fields.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
    ]
    mixers = [full if kind == "full_attention" else delta for kind in kinds]
    feeds = _sparse(fields, experts)
    names = Names(shared="mlp.shared_expert.")
    return _architecture(fields, [Layer(m, f) for m, f in zip(mixers, feeds, strict=True)], names=names)


def _numbered_on(fields: Fields, layers: list[Layer]) -> Prediction | None:
    modules = fields.count("num_nextn_predict_layers", default=0)
    return Prediction(modules, (layers[-1],), numbered_on=True) if modules else None


def _deepseek_v3(fields: Fields) -> Architecture:
    if fields.flag("attention_bias"):
        raise Incompatible(f"{fields.origin}: latent attention with biases", hint="attention_bias must be false")
    mixer = Latent(
        heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
        kv_rank=fields.count("kv_lora_rank"),
        nope=fields.count("qk_nope_head_dim"),
        rope=fields.count("qk_rope_head_dim"),
        value=fields.count("v_head_dim"),
    )
    layers = [Layer(mixer, feed) for feed in _first_dense(fields)]
    return _architecture(fields, layers, prediction=_numbered_on(fields, layers))


def _glm4_moe(fields: Fields) -> Architecture:
    mixer = _attention(fields, bias=fields.flag("attention_bias"), norms=fields.flag("use_qk_norm"))
    layers = [Layer(mixer, feed) for feed in _first_dense(fields)]
    return _architecture(fields, layers, prediction=_numbered_on(fields, layers))


def _first_dense(fields: Fields) -> list[Feed]:
    width = fields.count("moe_intermediate_size")
    shared = width * fields.count("n_shared_experts", default=0)
    experts = Experts(fields.count("n_routed_experts"), width, shared=shared, correction=True)
    dense, layers = fields.count("first_k_dense_replace", default=0), fields.count("num_hidden_layers")
    mlp = Mlp(fields.count("intermediate_size"))
    return [mlp if i < dense else experts for i in range(layers)]


def _gpt_oss(fields: Fields) -> Architecture:
    bias = fields.flag("attention_bias", default=True)
    mixer = _attention(fields, bias=bias, out_bias=bias, sinks=True)
    experts = Experts(
        fields.count("num_local_experts"), fields.count("intermediate_size"), stacked=True, router_bias=True
    )
    names = Names(router="mlp.router")
    return _architecture(fields, [Layer(mixer, experts)] * fields.count("num_hidden_layers"), names=names)


_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}


def _nemotron_h(fields: Fields) -> Architecture:
    for flag in ("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias"):
        if fields.flag(flag):
            raise Incompatible(f"{fields.origin}: a hybrid with {flag}", hint=f"{flag} must be false")
    layer = {
        "M": Layer(_mamba(fields), None),
        "*": Layer(_attention(fields), None),
        "-": Layer(None, Mlp(fields.count("intermediate_size", default=21504), gated=False)),
        "E": Layer(None, _hybrid_experts(fields)) if fields.get("n_routed_experts") else None,
    }

    def row(pattern: str | None, kinds: list[str] | None) -> list[Layer]:
        letters = pattern or "".join(_LETTERS.get(kind, "?") for kind in kinds or [])
        layers = [layer.get(letter) for letter in letters if letter != "|"]
        if not layers or None in layers:
            raise UsageError(f"{fields.origin}: the layer pattern {letters!r} is not made of M, E, * and -", hint="")
        return [found for found in layers if found]

    modules = fields.count("num_nextn_predict_layers", default=0)
    inner = row(fields.get("mtp_hybrid_override_pattern"), fields.get("mtp_layers_block_type")) if modules else []
    return _architecture(
        fields,
        row(fields.get("hybrid_override_pattern"), fields.get("layers_block_type") or fields.get("layer_types")),
        names=Names(
            embedding="backbone.embeddings.weight",
            norm="backbone.norm_f.weight",
            layers="backbone.layers.",
            mixer="mixer.",
            mixer_norm="norm.weight",
            feed="mixer.",
            feed_norm="norm.weight",
            router="mixer.gate",
            experts="mixer.experts.",
            shared="mixer.shared_experts.",
        ),
        prediction=Prediction(modules, tuple(inner), numbered_on=False) if modules else None,
    )


def _mamba(fields: Fields) -> Mamba:
    return Mamba(
        heads=fields.count("mamba_num_heads", default=128),
        head=fields.count("mamba_head_dim", default=64),
        groups=fields.count("n_groups", "mamba_n_groups", default=8),
        state=fields.count("ssm_state_size", default=128),
        kernel=fields.count("conv_kernel", "mamba_d_conv", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )


def _hybrid_experts(fields: Fields) -> Experts:
    return Experts(
        fields.count("n_routed_experts"),
        fields.count("moe_intermediate_size"),
        shared=fields.count("moe_shared_expert_intermediate_size"),
        gated=False,
        correction=True,
        latent=fields.count("moe_latent_size", default=0),
    )


FAMILIES: dict[str, Callable[[Fields], Architecture]] = {
    "llama": _dense,
    "qwen2": lambda fields: _dense(fields, bias=True, out_bias=False),
    "qwen3": lambda fields: _dense(fields, norms=True),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "nemotron_h": _nemotron_h,
}
