from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import INDEX, Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.errors import Corrupt, Incompatible, NotFound

SPECS = [TensorSpec(f"layer.{i}.weight", "BF16", (4, 8)) for i in range(6)] + [TensorSpec("bias", "F32", (3,))]
LAYOUT = Layout(SPECS)
LANES = {2: "<u2", 4: "<u4"}
VALUES: dict[str, Bits] = {
    s.name: np.random.default_rng(i).integers(0, 256, s.nbytes, dtype=np.uint8).view(LANES[s.width])
    for i, s in enumerate(LAYOUT)
}


def write(out: Path, shard_bytes: int) -> None:
    write_checkpoint(
        out, LAYOUT, bits_of=VALUES.__getitem__, side_files={"config.json": b"{}"}, shard_bytes=shard_bytes
    )


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100, 1])
def test_a_checkpoint_reads_back_whatever_its_shards(tmp_path: Path, shard_bytes: int) -> None:
    write(tmp_path / "out", shard_bytes)
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.layout == LAYOUT
        assert checkpoint.side_files() == {"config.json": b"{}"}
        for spec in LAYOUT:
            assert np.array_equal(checkpoint.bits(spec.name), VALUES[spec.name])
        with pytest.raises(NotFound, match="nobody"):
            checkpoint.bits("nobody")
    assert (tmp_path / "out" / INDEX).exists() == (shard_bytes < 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", [(s, VALUES[s.name]) for s in LAYOUT])
    with Checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.layout == LAYOUT
        assert checkpoint.side_files() == {}


def test_transformers_loads_what_we_write(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    with Checkpoint(tmp_path / "base") as base:
        write_checkpoint(
            tmp_path / "out", base.layout, bits_of=base.bits, side_files=base.side_files(), shard_bytes=2000
        )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_an_index_must_agree_with_the_files(tmp_path: Path) -> None:
    write(tmp_path / "out", 100)
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    index["weight_map"]["layer.0.weight"], index["weight_map"]["layer.5.weight"] = (
        index["weight_map"]["layer.5.weight"],
        index["weight_map"]["layer.0.weight"],
    )
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    with pytest.raises(Corrupt, match=r"layer\.0\.weight, layer\.5\.weight"):
        Checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"weight_map": 3}',
        b'{"weight_map": {"x": "../x.safetensors"}}',
        b'{"weight_map": {"x": "\\u0000.safetensors"}}',
    ],
)
def test_a_broken_index_is_corrupt(tmp_path: Path, body: bytes) -> None:
    write(tmp_path / "out", 100)
    (tmp_path / "out" / INDEX).write_bytes(body)
    with pytest.raises(Corrupt, match=INDEX):
        Checkpoint(tmp_path / "out")


def test_of_several_indexes_the_usual_one_counts(tmp_path: Path) -> None:
    write(tmp_path, 100)
    body = (tmp_path / INDEX).read_bytes()
    for name in ("consolidated", "another"):
        (tmp_path / f"{name}.safetensors.index.json").write_bytes(b'{"weight_map": {"x": "gone.safetensors"}}')
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layout == LAYOUT
    (tmp_path / INDEX).unlink()
    with pytest.raises(Incompatible, match="several indexes"):
        Checkpoint(tmp_path)
    (tmp_path / "another.safetensors.index.json").unlink()
    (tmp_path / "consolidated.safetensors.index.json").write_bytes(body)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layout == LAYOUT


def test_files_beside_an_index_that_it_does_not_name_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "out", 100)
    (tmp_path / "out" / "consolidated.safetensors").write_bytes(b"not ours")
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.layout == LAYOUT


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", [(SPECS[0], VALUES[SPECS[0].name])])
    with pytest.raises(Incompatible, match=r"layer\.0\.weight"):
        Checkpoint(tmp_path)


def test_nothing_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no checkpoint"):
        Checkpoint(tmp_path / "no")
    with pytest.raises(NotFound, match="holds no"):
        Checkpoint(tmp_path)
    write(tmp_path / "out", 100)
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    with pytest.raises(NotFound, match=r"index\.json names files that are not there: model-00006"):
        Checkpoint(tmp_path / "out")


def test_a_path_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="cannot be read: File name too long"):
        Checkpoint(tmp_path / ("x" * 300))


def test_a_directory_in_use_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", 100)
    with pytest.raises(Incompatible, match="not empty"):
        write(tmp_path / "out", 100)


def test_a_name_that_leads_nowhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Incompatible, match="not empty"):
        write(tmp_path / "out", 100)


def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance(tmp_path: Path) -> None:
    left = tmp_path / f".out.partial-{os.getpid()}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    write(tmp_path / "out", 100)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def bits_of(name: str) -> Bits:
        if name == "layer.3.weight":
            raise NotFound(name)
        return VALUES[name]

    with pytest.raises(NotFound):
        write_checkpoint(tmp_path / "out", LAYOUT, bits_of=bits_of, shard_bytes=100)
    assert not list(tmp_path.iterdir())


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    """An index that outlived its shards ended the publisher with a word about a shard."""
    write(tmp_path / "old", 100)
    write(tmp_path / "new", 1 << 30)
    shutil.copy(next((tmp_path / "old").glob("*.index.json")), tmp_path / "new")
    with Checkpoint(tmp_path / "new") as checkpoint:
        assert [file.path.name for file in checkpoint.files] == ["model.safetensors"]
        assert checkpoint.passed_by == ["model.safetensors.index.json"]
