"""A training run as one of its ranks: Megatron's own schedules, gradient buckets and optimizers, on a few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from support.megatron.bridge import Conversion
from support.megatron.models import chunks_of

SEQUENCE, BATCH = 16, 2


class Training:
    """Attributes:
    chunks: bare models, as they were built.
    wrapped: the same as a training script has them, in DDP and, in bf16, in `Float16Module`.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        degrees: dict[str, int],
        rank: int,
        weights: Mapping[str, torch.Tensor],
        *,
        bf16: bool,
        distributed: bool,
        fp32_router: bool = False,
        vocabulary_multiple: int = 128,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        dtype = torch.bfloat16 if bf16 else torch.float32
        options = {"bf16": bf16, "params_dtype": dtype, "pipeline_dtype": dtype}
        options |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
        if fp32_router:
            options["moe_router_dtype"] = "fp32"
        self.chunks = chunks_of(fields, degrees, vocabulary_multiple, **options)
        self.conversion = Conversion(self.chunks, fields, degrees, rank)
        self.conversion.load(weights)
        config = self.chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        buckets = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        inner = [Float16Module(config, chunk) if bf16 else chunk for chunk in self.chunks]
        if fp32_router:
            for name, parameter in ((n, p) for chunk in inner for n, p in chunk.named_parameters()):
                if name.endswith("router.weight"):
                    parameter.data = parameter.data.float()
        self.wrapped = [
            DistributedDataParallel(config, buckets, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(inner)
        ]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=0.0, weight_decay=0.0, bf16=bf16, params_dtype=dtype, clip_grad=0.0,
                use_distributed_optimizer=distributed,
            ),
            self.wrapped,
        )  # fmt: skip
        self._vocabulary, self._pp = fields["vocab_size"], degrees.get("pp", 1)
        self._random = torch.Generator().manual_seed(1)

    def step(self, rate: float) -> None:
        """One optimizer step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(()) for _ in self.wrapped] if len(self.wrapped) > 1 else iter(()),
            model=self.wrapped,
            num_microbatches=2 * self._pp,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        succeeded, _, _ = self._optimizer.step()
        assert succeeded

    def _forward(self, _: Any, model: Any) -> Any:
        tokens = torch.randint(0, self._vocabulary, (BATCH, SEQUENCE), generator=self._random)
        places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        output = model(tokens, places, None, labels=tokens)
        return output, partial(_mean, output)


def _mean(output: torch.Tensor, *_: Any) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}
