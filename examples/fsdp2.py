"""A sharded trainer that publishes: FSDP2 over any number of ranks, here on CPUs, a tiny mixture of experts.

    torchrun --nproc-per-node 4 examples/fsdp2.py /tmp/fsdp2
    dcr log file:///tmp/fsdp2/bucket
    dcr materialize file:///tmp/fsdp2/bucket --out /tmp/fsdp2/newest

Only the two lines with `publisher` are about publishing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from dcr_daemon import Publisher

CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def main(place: Path, steps: int = 5) -> None:
    dist.init_process_group("gloo")
    base = place / "base"
    if dist.get_rank() == 0 and not base.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_moe", **CONFIG)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    dist.barrier()

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)  # fp32 masters; the stream is bf16
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    url = (place / "bucket").absolute().as_uri()
    with Publisher(url, base=base, create=True, name="example", state=place / "state") as publisher:
        for step in range(1, steps + 1):
            tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update = publisher.publish(model, step=step)
            sealed = update.wait_sealed()
            if dist.get_rank() == 0:
                share = sealed.changed / sealed.elements
                print(
                    f"version {sealed.version}: {share:.2%} changed, {sealed.bytes:,} of {sealed.dense_bytes:,} bytes"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "fsdp2-demo"))
