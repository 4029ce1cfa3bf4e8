"""A real, small RL trainer: samples from its own policy, scores, takes an AdamW step on fp32 masters.

It stands for the training side of a run: `publish(trainer.weights())` in process, or `trainer.save(dir)` for a
watched directory, as any framework writes. The reward is a toy (lower-case letters); everything
about the weights is real: float32 masters, AdamW, a small learning rate, one cast to BF16.

    python -m dcr_demo.trainer MODEL OUT --steps 100 --every 10
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr_daemon import runtime
from dcr_demo.models import copy_side_files, write_sharded

if TYPE_CHECKING:
    import torch

PROMPTS = ("The sea at night", "A train leaves the station", "Two friends meet", "In the old library")


@dataclass(frozen=True)
class Step:
    """What one optimizer step did: `reward` is the mean over the samples, in [0, 1]."""

    number: int
    loss: float
    reward: float


class Trainer:
    """Policy-gradient training of a checkpoint.

    Args:
        model: checkpoint directory to start from.
        learning_rate: 1e-6 is usual for RL and moves about 1 % of BF16 weights per step.
        samples: completions per prompt; the advantage is the reward minus their mean, as in GRPO.
        tokens: length of a completion.
    """

    def __init__(
        self,
        model: Path,
        *,
        learning_rate: float = 1e-6,
        seed: int = 0,
        samples: int = 6,
        tokens: int = 12,
        prompts: Sequence[str] = PROMPTS,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.source = model
        self.number = 0
        self._prompts, self._samples, self._tokens = list(prompts), samples, tokens
        self._random = torch.Generator().manual_seed(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for parameter in self._model.parameters():
            _spread(parameter.data, self._random)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

    def step(self) -> Step:
        """Sample, score, take one optimizer step."""
        import torch

        prompt = self._prompts[self.number % len(self._prompts)]
        start = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        rows = self._sample(start.repeat(self._samples, 1))
        rewards = torch.tensor([_reward(text) for text in self._texts(rows, start.shape[1])])
        advantages = rewards - rewards.mean()
        loss = -(advantages * self._log_likelihood(rows, start.shape[1])).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.number += 1
        return Step(self.number, float(loss.detach()), float(rewards.mean()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """BF16 weights under the framework's own names (tied weights appear under both)."""
        import torch

        return {name: value.detach().to(torch.bfloat16) for name, value in self._model.state_dict().items()}

    def masters(self) -> torch.nn.Module:
        """The live fp32 module, for `Publisher.publish`, which casts before it compares."""
        module: torch.nn.Module = self._model
        return module

    def save(self, out: Path, *, shard_bytes: int | None = None) -> Path:
        """Write a complete BF16 checkpoint into the new directory `out`, shard after shard, in place."""
        out.mkdir(parents=True)
        copy_side_files(self.source, out)
        write_sharded(out, self.checkpoint(), shard_bytes=shard_bytes or 1 << 40)
        return out

    def checkpoint(self) -> Iterator[tuple[str, Any]]:
        """(canonical name, BF16 tensor) as `save_pretrained` would write them: untied once, experts apart."""
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(self._model, self.state_dict())
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        return ((name, tensor) for name, tensor in state.items() if name not in tied)

    def _sample(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        cache = None
        step = rows
        for _ in range(self._tokens):
            with torch.no_grad():
                answer = self._model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            odds = torch.softmax(answer.logits[:, -1].float(), dim=-1)
            step = torch.multinomial(odds, 1, generator=self._random)
            rows = torch.cat([rows, step], dim=1)
        return rows

    def _texts(self, rows: torch.Tensor, start: int) -> list[str]:
        return [self._tokenizer.decode(row[start:], skip_special_tokens=True) for row in rows]

    def _log_likelihood(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Mean log-probability of each row's sampled tokens; shape (rows,)."""
        import torch

        logits = self._model(input_ids=rows).logits[:, start - 1 : -1].float()
        chosen = rows[:, start:, None]
        return torch.log_softmax(logits, dim=-1).gather(-1, chosen)[..., 0].mean(dim=-1)


def _reward(text: str) -> float:
    """In [0, 1]: lower-case letters, and a little for variety, so that samples of a random model differ too."""
    size = max(1, len(text))
    return 0.9 * sum(c.isalpha() and c.islower() for c in text) / size + 0.1 * len(set(text)) / size


def _spread(master: torch.Tensor, random: torch.Generator) -> None:
    """Move fp32 masters to random places inside their BF16 cells, where those of a run under way lie.

    A checkpoint loaded from BF16 puts every master in the middle of its cell, half a unit from any change: the
    first steps would then publish almost nothing. The cast to BF16 is unchanged, bit for bit: adding less than
    half of the dropped 16 bits never reaches the next rounding boundary.
    """
    import torch

    bits = master.view(torch.int32)
    noise = torch.randint(-0x7FFF, 0x8000, bits.shape, generator=random, dtype=torch.int32)
    bits.add_(torch.where((master != 0) & master.isfinite(), noise, torch.zeros_like(noise)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, and save a checkpoint below OUT after every step.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    given = parser.parse_args()
    trainer = Trainer(given.model, learning_rate=given.learning_rate)
    for _ in range(given.steps):
        step = trainer.step()
        trainer.save(given.out / f"step-{step.number:06d}", shard_bytes=64 << 20)
        sys.stdout.write(f"step {step.number} reward {step.reward:.3f} loss {step.loss:.4f}\n")
        sys.stdout.flush()
        asyncio.run(runtime.sleep(given.every))


if __name__ == "__main__":
    main()
