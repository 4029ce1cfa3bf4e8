"""Publish from inside a training loop: a minimal language-model fine-tuning, one version per optimizer step.

    python examples/train_and_publish.py --model /models/qwen3 --stream file:///tmp/streams/run-1 --steps 10

Beside it, anywhere that sees the stream:

    dcr subscribe --from file:///tmp/streams/run-1 --engine dir:///models/current
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcr_daemon import Publisher

TEXTS = ("The sea at night is calm.", "A train leaves the station at noon.", "Two friends meet in the old library.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    with Publisher(given.stream, base=given.model, create=True) as publisher:
        for step in range(1, given.steps + 1):
            ids = tokenizer(TEXTS[step % len(TEXTS)], return_tensors="pt")["input_ids"]
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Masters are fp32 and the stream is BF16: the publisher casts once, then compares bits.
            sealed = publisher.publish(model, step=step, metadata={"loss": loss.item()}).wait_sealed()
            share, size = sealed.changed / sealed.elements, sealed.bytes
            print(f"step {step}: version {sealed.version}, {share:.2%} changed, {size:,} bytes")


if __name__ == "__main__":
    main()
