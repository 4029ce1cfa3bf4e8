"""Many families of models, each loaded by vLLM's own loader: what a refit leaves is what a fresh load makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm import inprocess
from support.vllm.model_families import FAMILIES, write_family
from support.vllm.refits import RefittedRanks, different
from support.vllm.worker_rig import Driver, Lanes, Worker, step, vector, write_version

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import JobState, Op, TensorHandling
from dcr_demo.models import copy_side_files

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspect_here")]


def read(path: Path) -> tuple[Layout, Lanes]:
    with Checkpoint(path) as checkpoint:
        layout = checkpoint.layout
        return layout, [checkpoint.bits(spec.name).reshape(-1).copy() for spec in layout]


def write(out: Path, layout: Layout, lanes: Lanes, like: Path) -> Path:
    write_checkpoint(
        out, layout, bits_of={spec.name: bits for spec, bits in zip(layout, lanes, strict=True)}.__getitem__
    )
    copy_side_files(like, out)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refit_leaves_what_a_fresh_load_makes(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", family)
    layout, lanes = read(path)
    model, config = inprocess.load(path, skip_tokenizer_init=True, max_model_len=128)
    first = inprocess.state(model)
    driver = Driver(Worker(model, config))
    attached = driver.attach(layout, tmp_path)
    assert attached.refusals == {}
    assert set(attached.held) == {TensorHandling.PLACED}
    assert (driver.fingerprint(layout, attached) == vector(layout, lanes)).all()
    changed = step(lanes, 0.05, seed=1)
    hop = write_version(tmp_path / "chunks", layout, lanes, changed, version=1)
    for txn in ("back", "on"):
        prepared = driver.prepare(txn, [hop])
        assert driver.swap(txn) == prepared.after
        if txn == "back":
            assert driver.ok(Op.ROLLBACK, calls.Sums, txn=txn) == prepared.before
            driver.ok(Op.CLOSE, txn=txn)
            assert not inprocess.differing(first, inprocess.state(model))
    driver.ok(Op.COMMIT, txn="on")
    assert (driver.fingerprint(layout, attached) == vector(layout, changed)).all()
    fresh = write(tmp_path / "v1", layout, changed, path)
    assert different(model, inprocess.load(fresh, skip_tokenizer_init=True, max_model_len=128)[0]) == []


#: What each family is there for.
TWO_RANKS = {
    "llama": "one key-value head on both ranks, a vocabulary that is padded before it is split",
    "gpt_oss": "biases that the first rank holds and the other fills with zeros, sinks, experts cut on either axis",
    "deepseek_v3": "latent attention: projections on both ranks, matrices that are views of one that is split",
    "nemotron_h": "a mixer whose projections are split in parts of different sizes",
    "qwen3_next": "gated delta nets, a shared expert, a gate that both ranks hold",
}


@pytest.mark.parametrize("family", TWO_RANKS)
def test_a_refit_of_two_ranks_leaves_on_each_what_a_fresh_load_makes(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", family)
    case = RefittedRanks(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    assert case.wrong_sums() == []
    case.refit(step(case.ranks[0].states[-1], 0.1, seed=1))
    assert case.wrong_sums() == []
    assert case.against_a_fresh_load() == []


def test_the_second_rank_of_gpt_oss_holds_zeros_instead_of_a_bias(tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", "gpt_oss")
    case = RefittedRanks(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    first, second = (
        {case.layout[tensor].name for tensor, how in enumerate(rank.attached.held) if how is TensorHandling.SKIPPED}
        for rank in case.ranks
    )
    assert first == set()
    assert second == {spec.name for spec in case.layout if spec.name.endswith("down_proj_bias")}


def anchor(out: Path, layout: Layout, lanes: Lanes) -> str:
    """A file with all tensors of a version."""
    write_checkpoint(
        out, layout, bits_of={spec.name: bits for spec, bits in zip(layout, lanes, strict=True)}.__getitem__
    )
    (path,) = out.glob("*.safetensors")
    return str(path)


def with_tensors(path: Path, **more: torch.Tensor) -> Path:
    """The checkpoint with further tensors in it."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    save_file(load_file(file) | more, file, {"format": "pt"})
    return path


def test_a_tied_head_that_is_stored_as_well_stays_equal_or_nothing_is_written(tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", "llama", tie_word_embeddings=True)
    with Checkpoint(path) as checkpoint:
        embedding = torch.from_numpy(checkpoint.bits("model.embed_tokens.weight").copy()).view(torch.bfloat16)
    layout, lanes = read(with_tensors(path, **{"lm_head.weight": embedding.reshape(300, 64)}))
    model, config = inprocess.load(path, skip_tokenizer_init=True, max_model_len=128)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    driver = Driver(Worker(model, config))
    attached = driver.attach(layout, tmp_path)
    assert attached.refusals == {}
    assert (driver.fingerprint(layout, attached) == vector(layout, lanes)).all()
    apart = step(lanes, 0.05, seed=1)
    together = list(apart)
    together[layout.index("lm_head.weight")] = apart[layout.index("model.embed_tokens.weight")]
    alone = list(lanes)
    alone[layout.index("lm_head.weight")] = apart[layout.index("lm_head.weight")]
    for number, wrong in enumerate((apart, alone)):
        hop = write_version(tmp_path / f"apart{number}", layout, lanes, wrong, version=1)
        driver.ok(Op.START, id=f"apart{number}", kind="prepare", hops=[hop.hop])
        status = driver.finish(f"apart{number}")
        assert (status.state, status.code) == (JobState.FAILED, calls.Code.REFUSED)
        assert "share their memory" in status.error
    driver.ok(Op.START, id="anchor", kind="check", files=[anchor(tmp_path / "apart", layout, apart)])
    status = driver.finish("anchor")
    assert (status.state, status.code) == (JobState.FAILED, calls.Code.REFUSED)
    assert "lm_head.weight and model.embed_tokens.weight share their memory" in status.error
    driver.ok(Op.START, id="good", kind="check", files=[anchor(tmp_path / "together", layout, together)])
    assert driver.finish("good").state is JobState.DONE
    assert (driver.fingerprint(layout, attached) == vector(layout, lanes)).all()
    prepared = driver.prepare("t", [write_version(tmp_path / "both", layout, lanes, together, version=1)])
    assert driver.swap("t") == prepared.after
    driver.ok(Op.COMMIT, txn="t")
    assert (driver.fingerprint(layout, attached) == vector(layout, together)).all()
    fresh = write(tmp_path / "v1", layout, together, path)
    assert different(model, inprocess.load(fresh, skip_tokenizer_init=True, max_model_len=128)[0]) == []


def test_what_no_loader_reads_is_skipped_and_hinders_nothing(tmp_path: Path) -> None:
    """Frequencies that old checkpoints store; layers that predict further tokens ahead are the same case."""
    path = write_family(tmp_path / "v0", "llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    layout, _ = read(with_tensors(path, **extra))
    model, config = inprocess.load(path, skip_tokenizer_init=True, max_model_len=128)
    attached = Driver(Worker(model, config)).attach(layout, tmp_path)
    assert attached.refusals == {}
    skipped = [layout[i].name for i, held in enumerate(attached.held) if held is TensorHandling.SKIPPED]
    assert skipped == list(extra)


def test_the_way_out_is_named_for_copies_of_latent_attention_and_for_no_others(tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", "deepseek_v2")
    layout, _ = read(path)
    model, config = inprocess.load(path, skip_tokenizer_init=True, max_model_len=128)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.packed, mlp.packed = (layer.weight.flip(0) for layer in (attention.kv_b_proj, mlp.down_proj))
    refusals = Driver(Worker(model, config)).attach(layout, tmp_path).refusals
    latent, dense = (refusals[f"model.layers.0.{name}.weight"] for name in ("self_attn.kv_b_proj", "mlp.down_proj"))
    assert "self_attn.packed, a copy of" in latent
    assert latent.endswith("; start vLLM with VLLM_MLA_DISABLE=1")
    assert "mlp.packed, a copy of" in dense
    assert dense.endswith("as it was (on a CPU; a GPU may keep it as loaded)")


@pytest.mark.parametrize(
    ("stored", "served"), [("float16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_weights_served_in_another_dtype_are_refused_by_name(stored: str, served: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", "llama", dtype=stored)
    layout, _ = read(path)
    model, config = inprocess.load(path, skip_tokenizer_init=True, max_model_len=128, dtype=served)
    attached = Driver(Worker(model, config)).attach(layout, tmp_path)
    assert attached.refusals.keys() == {spec.name for spec in layout}
    assert all(f"casts it from torch.{stored} to torch.{served}" in text for text in attached.refusals.values())
