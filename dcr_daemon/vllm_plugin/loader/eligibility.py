"""The rules for what may be updated in place. Pure: a vLLM configuration or a module in, reasons for refusing it out.

Runs in the worker process, called by `place_model`. A fingerprint proves that a parameter holds the right bits. It
cannot prove that the engine computes with that parameter: a packed copy of it would become stale unnoticed. So
parameters are accepted by an allowlist of (kind of layer, platform), and whole models are refused by configuration.
Tensors that were derived from weights are found by `derived`, without a rule.
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

#: Methods of speculative decoding that propose tokens without weights. vLLM gives them the target's own configuration.
WEIGHTLESS_DRAFTS = ("ngram", "ngram_gpu", "suffix")


def model_refusals(config: Any, *, caches: str = "reset") -> list[str]:
    """The reasons for refusing a whole vLLM instance, from its `VllmConfig`; empty if it is accepted. `caches`:
    `DCR_CACHES`, what happens to KV caches at a swap."""
    model, parallel = config.model_config, config.parallel_config
    speculative = config.speculative_config
    uva, prefetch = config.offload_config.uva, config.offload_config.prefetch
    checks = [
        (
            model.quantization is not None,
            f"the model is quantised ({model.quantization}): its weights are not the checkpoint's bits; serve the "
            "unquantised checkpoint",
        ),
        (
            parallel.enable_eplb,
            "expert load balancing (--enable-eplb) moves experts after they were placed; use --enable-expert-parallel "
            "alone",
        ),
        (
            parallel.enable_elastic_ep,
            "elastic expert parallelism moves experts after they were placed; use --enable-expert-parallel alone",
        ),
        (
            config.lora_config is not None,
            "adapters (--enable-lora) are not in the stream; publish the policy with them merged",
        ),
        (
            model.enable_sleep_mode,
            "sleep mode (--enable-sleep-mode) unmaps weights; give trainer and engine their own devices, or stop the "
            "server while the trainer needs its memory",
        ),
        (
            uva.cpu_offload_gb > 0 or prefetch.offload_group_size > 0,
            "weights are offloaded to host memory; spread them over more ranks (--tensor-parallel-size)",
        ),
        (
            speculative is not None and speculative.method not in WEIGHTLESS_DRAFTS,
            "a draft model holds weights of its own (--speculative-config); use the method ngram or suffix, which hold "
            "none",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            "mixture of experts with data parallel engines: experts are split over engines (must E9); use "
            "--tensor-parallel-size with --enable-expert-parallel, and a server for each replica",
        ),
    ]
    reasons = [reason for refused, reason in checks if refused]
    return reasons if caches == "keep" else reasons + _cache_refusals(config.kv_transfer_config)


def _cache_refusals(transfer: Any) -> list[str]:
    """The reasons for refusing a KV connector (`KVTransferConfig` or None) that would keep the old policy's cache over
    a swap: vLLM counts a connector that does not implement `reset_cache` as one whose cache was reset."""
    if transfer is None or transfer.kv_connector is None:
        return []
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    if transfer.kv_connector == "MultiConnector":  # resets each of its own, and believes what they answer
        children = transfer.kv_connector_extra_config.get("connectors", [])
        return [reason for child in children for reason in _cache_refusals(KVTransferConfig(**child))]
    connector = KVConnectorFactory.get_connector_class(transfer)
    if connector.reset_cache is not KVConnectorBase_V1.reset_cache:
        return []
    return [
        f"the KV connector {transfer.kv_connector} cannot drop the old policy's cache at a swap (no reset_cache); "
        "use one that can, or set DCR_CACHES=keep if your training corrects for it"
    ]


def module_refusal(module: torch.nn.Module, platform: str) -> str | None:
    """The reason why the parameters of one module (not of its children) must not be written in place, or None."""
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


def on_a_cpu(live: torch.Tensor) -> str:
    """Added to what is refused for what vLLM makes of weights after loading: it packs more of them on a CPU."""
    return " (on a CPU; a GPU may keep it as loaded)" if live.device.type == "cpu" else ""
