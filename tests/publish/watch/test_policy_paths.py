from __future__ import annotations

import pytest

from dcr_daemon.errors import UsageError
from dcr_daemon.publish.watch.policy_paths import PolicyPaths, shape_of, step_in


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("checkpoint-40", 40),  # Trainer, TRL
        ("ckpt_40", 40),
        ("global_step_7/actor/huggingface", 7),  # verl
        ("global_step7_hf", 7),  # OpenRLHF
        ("run2/step_0011", 11),  # NeMo-RL
        ("Qwen2.5-7B/step-12", 12),  # torchtitan
        ("epoch=3-step=12", 12),  # Lightning
        ("step=12-epoch=3", 12),
        ("iter_0000100", 100),  # Megatron
        ("checkpoint-40/pytorch_model_fsdp_0", 40),  # accelerate
        ("v2/0040", 40),
        ("final", None),
        ("20260101120000123456789", None),
    ],
)
def test_the_step_is_the_number_behind_a_word_for_steps(path: str, step: int | None) -> None:
    assert step_in(path) == step


def test_of_numbers_without_a_word_the_one_that_varies_is_the_step() -> None:
    paths = PolicyPaths()
    assert paths.step("40/model_0") == 0
    paths.learn("30/model_0")
    assert paths.step("40/model_0") == 40
    assert paths.step("run2/checkpoint-500") == 500
    paths.learn("run1/checkpoint-500")
    assert paths.step("run2/checkpoint-500") == 500, "the run varies, and the step has a word"


@pytest.mark.parametrize(("pattern", "step"), [("a([0-9]+)", 7), ("b[0-9]+", 3), ("c([0-9]+)", None), ("(x)?a", None)])
def test_a_pattern_finds_the_step_instead(pattern: str, step: int | None) -> None:
    assert PolicyPaths(step=pattern).step("a7/b3") == step


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--step-pattern"):
        PolicyPaths(step="step_(")


def test_a_shape_has_no_numbers_and_no_mark_of_a_directory_being_written() -> None:
    assert shape_of("global_step_7/actor/huggingface") == shape_of("global_step_4000/actor/huggingface")
    assert {shape_of(name) for name in ("tmp-checkpoint-3", "checkpoint-3", "checkpoint-4.tmp")} == {"checkpoint-*"}
    assert len({shape_of(name) for name in ("checkpoint-3", "ema/checkpoint-3", "checkpoint-3/critic", "best")}) == 4
    assert shape_of("tmp-") == "tmp-"


def test_a_directory_that_will_be_renamed_tells_nothing_of_the_policy_s_paths() -> None:
    paths = PolicyPaths()
    paths.learn("tmp-40")
    assert paths.is_policy("checkpoint-40")


def test_the_newest_version_says_what_the_policy_looks_like_unless_the_user_does() -> None:
    paths = PolicyPaths()
    assert paths.is_policy("checkpoint-1/critic"), "nothing is published yet"
    paths.learn("checkpoint-1/actor")
    assert paths.is_policy("checkpoint-2/actor")
    assert not paths.is_policy("checkpoint-1/critic")
    chosen = PolicyPaths(["checkpoint-*", "run*/final/"])
    chosen.learn("checkpoint-1")
    assert [chosen.selects(path) for path in ("checkpoint-1", "run3/final", "checkpoint-1/critic", "final")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert chosen.is_policy("run3/final")


@pytest.mark.parametrize("glob", ["", "a//b", "../a", "a/b/c/d/e"])
def test_a_glob_that_no_checkpoint_matches_is_refused(glob: str) -> None:
    with pytest.raises(UsageError, match="--select"):
        PolicyPaths([glob])
