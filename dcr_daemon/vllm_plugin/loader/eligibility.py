"""The rules for what may be updated in place. Pure: a vLLM configuration or a module in, reasons for refusing it out.

Runs in the worker process, called by `place_model`. A fingerprint proves that a parameter holds the right bits. It
cannot prove that the engine computes with that parameter: a packed copy of it, or a matrix that was derived from it
once, would become stale unnoticed. So parameters are accepted by an allowlist of (kind of layer, platform), and whole
models are refused by configuration.
"""

from __future__ import annotations

from typing import Any

import torch

#: Quantisation methods whose kernels read the parameters themselves, on the platforms named.
PLAIN_METHODS: dict[str, tuple[str, ...]] = {
    "UnquantizedLinearMethod": ("cpu", "cuda", "rocm"),
    "UnquantizedEmbeddingMethod": ("cpu", "cuda", "rocm"),
    "UnquantizedFusedMoEMethod": ("cpu", "cuda"),
}

#: Attributes that vLLM derives from a layer's weights once, after loading, and then computes with.
DERIVED = ("W_UK_T", "W_UV", "W_UK", "_cpu_unpacked_conv_weight")


def model_refusals(config: Any) -> list[str]:
    """The reasons for refusing a whole vLLM instance, from its `VllmConfig`; empty if it is accepted."""
    model, parallel = config.model_config, config.parallel_config
    speculative = config.speculative_config
    uva, prefetch = config.offload_config.uva, config.offload_config.prefetch
    checks = [
        (
            model.quantization is not None,
            f"the model is quantised ({model.quantization}): its weights are not the checkpoint's bits",
        ),
        (model.use_mla, "multi-head latent attention: kv_b_proj has derived copies that an update would leave stale"),
        (parallel.enable_eplb, "expert load balancing (--enable-eplb) moves experts after they were placed"),
        (parallel.enable_elastic_ep, "elastic expert parallelism moves experts after they were placed"),
        (config.lora_config is not None, "LoRA is enabled (--enable-lora)"),
        (model.enable_sleep_mode, "sleep mode (--enable-sleep-mode) unmaps weights"),
        (uva.cpu_offload_gb > 0 or prefetch.offload_group_size > 0, "weights are offloaded to host memory"),
        (
            speculative is not None and speculative.draft_model_config is not None,
            "a draft model holds weights of its own (--speculative-config)",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            "mixture of experts with data parallel engines: experts are split over engines (must E9)",
        ),
    ]
    return [reason for refused, reason in checks if refused]


def module_refusal(module: torch.nn.Module, platform: str) -> str | None:
    """The reason why the parameters of one module (not of its children) must not be written in place, or None."""
    derived = [name for name in DERIVED if getattr(module, name, None) is not None]
    if derived:
        return f"{type(module).__name__} computes with {', '.join(derived)}, derived from its weights after loading"
    packed = getattr(module, "cpu_linear", None)
    if platform == "cpu" and packed is not None and packed is not torch.nn.functional.linear:
        return (
            "on a CPU vLLM computes with a hidden packed copy of this weight; load the plugin `dcr` (VLLM_PLUGINS), "
            "whose CPU rig leaves weights unpacked"
        )
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    kind = type(method).__name__
    if platform in PLAIN_METHODS.get(kind, ()):
        return None
    return f"{kind} on {platform} is not known to compute with the parameter as it is loaded"
