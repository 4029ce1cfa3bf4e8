from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.checkpoint import safetensors as module
from dcr_daemon.checkpoint.safetensors import SafetensorsFile, read_header, write_safetensors
from dcr_daemon.errors import Corrupt, Incompatible, NotFound

Raw = Callable[..., Path]


def entry(dtype: str = "U8", shape: list[int] | None = None, begin: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


def specimens() -> list[tuple[TensorSpec, np.ndarray]]:
    rng = np.random.default_rng(1)
    specs = [
        TensorSpec("bf16", "BF16", (3, 5)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("empty", "F32", (0, 7)),
        TensorSpec("odd", "U8", (3,)),
        TensorSpec("wide", "I64", (2,)),
        TensorSpec("ünïcode", "F8_E4M3", (5,)),
    ]
    lanes = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
    return [(s, rng.integers(0, 256, s.nbytes, dtype=np.uint8).view(lanes[s.width])) for s in specs]


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    items = specimens()
    size = write_safetensors(tmp_path / "a.safetensors", items, metadata={"format": "pt"})
    assert size == (tmp_path / "a.safetensors").stat().st_size
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert {s.name for s in file.specs} == {s.name for s, _ in items}
        assert file.metadata == {"format": "pt"}
        for spec, bits in items:
            assert file.spec(spec.name) == spec
            assert np.array_equal(file.bits(spec.name), bits)
            assert np.array_equal(file.read(spec.name), bits)
            assert file.bits(spec.name).flags.aligned
        assert np.array_equal(file.read("bf16", 4, 7), items[0][1][4:11])


def test_the_reference_implementation_agrees_in_both_directions(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    write_safetensors(tmp_path / "ours.safetensors", specimens(), metadata={"format": "pt"})
    loaded = reference.load_file(tmp_path / "ours.safetensors")
    for spec, bits in specimens():
        assert tuple(loaded[spec.name].shape) == spec.shape
        assert loaded[spec.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bits.tobytes()
    tensors = {"x": torch.randn(3, 4, dtype=torch.bfloat16), "y": torch.tensor(2.5), "z": torch.zeros(0, 3)}
    reference.save_file(tensors, tmp_path / "theirs.safetensors")
    with SafetensorsFile(tmp_path / "theirs.safetensors") as file:
        assert [(s.name, s.dtype, s.shape) for s in sorted(file.specs)] == [
            ("x", "BF16", (3, 4)), ("y", "F32", ()), ("z", "F32", (0, 3)),
        ]  # fmt: skip
        assert file.bits("x").tobytes() == tensors["x"].view(torch.int16).numpy().tobytes()


def test_elements_are_written_in_place_and_seen_through_maps_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specimens())
    with SafetensorsFile(path) as reader, SafetensorsFile(path, writable=True) as file:
        seen = reader.bits("bf16")
        file.write_elements("bf16", np.array([2]), values=np.array([0xBEEF], "<u2"))
        file.sync()
        assert seen[2] == 0xBEEF
        with pytest.raises(ValueError, match="read-only"):
            file.bits("bf16")[2] = 0


def test_what_a_file_holds_already_is_not_written_again(tmp_path: Path) -> None:
    """So a rollback on a full disk needs no space for what was not written, in extents that a reflink shares."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [(TensorSpec("x", "BF16", (4,)), np.arange(4, dtype="<u2"))])
    with SafetensorsFile(path) as unwritable:
        unwritable.write_elements("x", np.array([1, 3]), values=np.array([1, 3], "<u2"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            unwritable.write_elements("x", np.array([1, 3]), values=np.array([1, 4], "<u2"))


@pytest.mark.parametrize("apart", [1, 2, 8191, 8192, 8193, 8194, 100_000])
def test_positions_that_are_near_or_far_from_each_other_are_all_written_and_nothing_else(tmp_path, apart) -> None:
    """Around the gap up to which elements are written together, and over the limit of one write."""
    path, size = tmp_path / "a.safetensors", (17 << 20) // 2
    before = np.arange(size, dtype="<u4").astype("<u2")
    write_safetensors(path, [(TensorSpec("x", "BF16", (size,)), before)])
    positions = np.arange(5, size, apart)
    after = before.copy()
    after[positions] ^= 0x8001
    with SafetensorsFile(path, writable=True) as file:
        file.write_elements("x", positions, values=after[positions])
        file.write_elements("x", positions[:0], values=after[:0])
        assert np.array_equal(file.bits("x"), after)
        assert file.holds_elements("x", positions, values=after[positions])
        assert file.holds_elements("x", positions[:0], values=after[:0])
        for wrong in (0, positions.size // 2, positions.size - 1):
            other = after[positions]
            other[wrong] ^= 1
            assert not file.holds_elements("x", positions, values=other)


def test_an_unaligned_file_still_gives_aligned_lanes(raw_file: Raw) -> None:
    header = json.dumps({"x": entry("BF16", [2], 0, 4)}).encode()
    header += b" " * (1 - len(header) % 2)
    path = raw_file(header, b"\x01\x02\x03\x04")
    with SafetensorsFile(path) as file:
        assert file.bits("x").flags.aligned
        assert file.bits("x").tolist() == [0x0201, 0x0403]


@pytest.mark.parametrize(
    ("table", "data", "what"),
    [
        ({"x": entry()}, b"123", "holds 3"),
        ({"x": entry()}, b"12345", "holds 5"),
        ({"x": entry(end=5)}, b"12345", "spans 5 bytes"),
        ({"x": entry(), "y": entry(begin=2, end=6)}, b"123456", "begins at byte 2"),
        ({"x": entry(), "y": entry(begin=6, end=10)}, b"1" * 10, "begins at byte 6"),
        ({"x": entry(begin=1, end=5)}, b"12345", "begins at byte 1"),
        ({"x": entry(shape=[-4])}, b"1234", "not a list of sizes"),
        ({"x": entry(shape=[2, 2.0])}, b"1234", "not a list of sizes"),
        ({"x": entry(shape=[True, 4])}, b"1234", "not a list of sizes"),
        ({"x": {"dtype": "U8"}}, b"", "entry of 'x'"),
        ({"x": entry(), "__metadata__": {"a": 1}}, b"1234", "__metadata__"),
        (b'{"x": 1, "x": 2}', b"", "occurs twice"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', b"", "surrogates"),
        (b'{"x"', b"", "damaged"),
        (b"{" + b'"a":{' * 5000, b"", "damaged"),
    ],
)
def test_a_damaged_file_is_corrupt_and_named(raw_file: Raw, table: Any, data: bytes, what: str) -> None:
    path = raw_file(table, data)
    with pytest.raises(Corrupt, match=what) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    with pytest.raises(Corrupt):
        SafetensorsFile(path)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, 60, -1])
def test_every_truncation_is_found_from_the_header(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specimens())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Corrupt, match="truncated"):
        read_header(path)


def test_other_files_are_incompatible(raw_file: Raw, tmp_path: Path) -> None:
    (tmp_path / "torch.safetensors").write_bytes(b"PK\x03\x04" + b"\xff" * 100)
    with pytest.raises(Incompatible, match="not a safetensors file"):
        read_header(tmp_path / "torch.safetensors")
    with pytest.raises(Incompatible, match="not JSON"):
        read_header(raw_file(b"hello world"))
    with pytest.raises(Incompatible, match="F4"):
        read_header(raw_file({"x": entry("F4")}, b"1234"))
    with pytest.raises(NotFound):
        read_header(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_plain_file_is_refused_and_never_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a.safetensors"
    make(path)
    for look in (read_header, SafetensorsFile):
        with pytest.raises(Incompatible, match="not a regular file"):
            look(path)


@pytest.mark.parametrize("error", [EOFError(8), OSError(errno.EIO, "Input/output error")])
def test_a_header_that_cannot_be_read_to_its_end_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specimens())

    def fail(descriptor: int, size: int, at: int) -> bytes:
        raise error

    monkeypatch.setattr(module, "_read_exact", fail)
    for look in (read_header, SafetensorsFile):
        with pytest.raises(Corrupt, match=r"a\.safetensors cannot be read"):
            look(path)


def test_a_huge_header_claim_allocates_nothing(raw_file: Raw) -> None:
    with pytest.raises(Incompatible, match="claims a header"):
        read_header(raw_file({}, length=1 << 62))
    with pytest.raises(Corrupt, match="truncated"):
        read_header(raw_file({}, length=99 << 20))


def test_reading_a_file_that_shrinks_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specimens())
    with SafetensorsFile(path) as file:
        with path.open("r+b") as other:
            other.truncate(100)
        with pytest.raises(Corrupt, match="truncated while"):
            file.read("odd")


def test_a_writer_overwrites_nothing_and_checks_its_lanes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, specimens())
    with pytest.raises(FileExistsError):
        write_safetensors(path, specimens())
    assert path.exists()
    with pytest.raises(ValueError, match="elements of"):
        write_safetensors(tmp_path / "b.safetensors", [(TensorSpec("x", "BF16", (4,)), np.zeros(3, "<u2"))])


@given(st.binary(max_size=200), st.integers(0, 300))
def test_arbitrary_bytes_never_crash_the_parser(tmp_path_factory: pytest.TempPathFactory, body: bytes, n: int) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz-{n}.safetensors"
    path.write_bytes(n.to_bytes(8, "little") + b"{" + body)
    with pytest.raises((Corrupt, Incompatible)):
        read_header(path)
