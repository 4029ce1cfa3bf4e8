"""One rank of a training job that publishes what it holds, under any launcher that sets RANK and WORLD_SIZE.

    python -m support.ranks.programs.training OUT CASE... [--base CHECKPOINT] [--stream URL] [--gated]

For each case in turn: a real model, real losses, AdamW; before each update rank 0 writes the framework's own export as
`OUT/CASE/step-N`; what the publisher takes from memory meanwhile is in `OUT/CASE/rank-R.json`. The next optimizer step
begins as soon as `publish` returns, or, gated, when `OUT/CASE/go-N` is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dcr_daemon import Publisher
from support.ranks.exports import export, unwrapped
from support.ranks.training_cases import BY_NAME, COMMON, Case

NAME = "trainer"
Measured = Callable[[], AbstractContextManager[None]]


class Training:
    """A model of this rank, and steps on text that all ranks share."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model = case, model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self._random = torch.Generator().manual_seed(1)

    def step(self, rate: float) -> None:
        vocabulary = unwrapped(self.model).config.vocab_size
        tokens = torch.randint(0, vocabulary, (4, 24), generator=self._random)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        group, alike = getattr(self.model, "averaged", (None, ()))
        for parameter in alike:
            dist.all_reduce(_local(parameter.grad), group=group)
        if rate:
            self._optimizer.step()

    def given(self) -> Any:
        return self.model if self.case.given == "module" else self.model.state_dict()


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def write_models(case: Case, place: Path) -> None:
    """Version 0 (`base`, bf16), and what training starts from (`masters`): the same before rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(case.kind, **(COMMON | case.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(case.dtype).save_pretrained(place / "masters")
    model.to(torch.bfloat16).save_pretrained(place / "base")


class Options(Protocol):
    out: Path
    cases: list[str]
    base: Path | None
    stream: str | None
    gated: bool


def run_case(case: Case, place: Path, options: Options, measured: Measured) -> None:
    """Every step of a case, all ranks alike."""
    url, base = options.stream or (place / "bucket").as_uri(), options.base or place / "base"
    if dist.get_rank() == 0 and not options.base:
        write_models(case, place)
    dist.barrier()
    training = Training(case, case.build(options.base or place / "masters"))
    export(training.model, place / "step-0")
    with contextlib.ExitStack() as stack:
        with measured():
            publisher = Publisher(url, base=base, create=True, name=NAME, state=place / "state")
        stack.callback(_close, publisher, measured)
        update = None
        for number, rate in enumerate(case.rates, 1):
            if options.gated:
                _wait_for(place / f"go-{number}")
            training.step(rate)
            export(training.model, place / f"step-{number}")
            with measured():
                if update:
                    update.wait_sealed(300)
                update = publisher.publish(training.given(), step=number)
        training.step(1.0)  # the weights may change before the version exists
        with measured():
            sealed = update.wait_sealed(300)
        assert sealed.version == len(case.rates), sealed


def _close(publisher: Any, measured: Measured) -> None:
    with measured():
        publisher.close()


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.05)


def main(options: Options) -> None:
    from transformers.utils.logging import disable_progress_bar

    from support.measure.largest_allocation import proved_meter

    disable_progress_bar()
    torch.set_num_threads(1)
    meter = proved_meter()
    with joined(options.out):
        rank = dist.get_rank()
        for name in options.cases:
            place = options.out / name
            print(f"case {name}", flush=True)
            run_case(BY_NAME[name], place, options, meter.measured)
            done = place / f"rank-{rank}.json"
            done.with_suffix(".part").write_text(json.dumps(asdict(meter.taken())))
            done.with_suffix(".part").rename(done)
            dist.barrier()


@contextlib.contextmanager
def joined(out: Path) -> Iterator[None]:
    """A process group by torchrun's rendezvous, else over a file: no ports."""
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", choices=sorted(BY_NAME), metavar="CASE")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--stream")
    parser.add_argument("--gated", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main(parsed())
