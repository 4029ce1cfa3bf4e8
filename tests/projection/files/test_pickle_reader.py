"""Pickles as data: what they hold, and that nothing of them runs, whatever they are."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_daemon.projection.files.pickle_reader import Opaque, read_pickle

atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text()
plain = st.recursive(
    atoms, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.sets(keys)
)


@given(plain, st.integers(4, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_what_it_was(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(keys, inner)))
def test_tables_of_an_older_protocol_are_read_too(value: Any) -> None:
    assert read_pickle(pickle.dumps(value, 2)) == value


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self.path,)


def test_nothing_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    found = read_pickle(pickle.dumps({"x": Trap(trap)}))["x"]
    assert isinstance(found, Opaque)
    assert found.kind == "pathlib.Path.touch"
    assert found.arguments[0].kind.endswith("PosixPath")
    assert not trap.exists()


def test_constructions_say_what_they_would_be() -> None:
    found = read_pickle(pickle.dumps(collections.OrderedDict(a=1)))
    assert (found.kind, found.items) == ("collections.OrderedDict", {"a": 1})
    shared = read_pickle(pickle.dumps([pathlib.PurePosixPath("a"), *[[1]] * 2]))
    assert shared[0].kind.endswith("PurePosixPath")
    assert shared[1] is shared[2]


@given(st.binary(max_size=60))
def test_any_bytes_at_all_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_pickle(body)


@given(plain, st.data())
def test_a_pickle_cut_or_changed_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    body = bytearray(pickle.dumps(value, 4))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        read_pickle(bytes(body[: data.draw(st.integers(0, len(body) - 1))]))
    with contextlib.suppress(ValueError):
        read_pickle(bytes(body))


@pytest.mark.parametrize("into", ["dict", "set"])
def test_a_key_of_a_million_nested_tuples_does_not_end_the_process(into: str) -> None:
    """Its hash would recurse without a limit, in C."""
    deep = b")" + b"\x85" * 1_000_000
    body = b"\x80\x04}" + deep + b"Ns." if into == "dict" else b"\x80\x04\x8f(" + deep + b"\x90."
    with pytest.raises(ValueError, match="nested keys"):
        read_pickle(body)


def test_a_few_bytes_do_not_ask_for_a_list_again_and_again() -> None:
    body = b"\x80\x04cbuiltins\nlist\nq\x00]q\x01(" + b"K\x00" * 1000 + b"e" + b"h\x00h\x01R" * 1000 + b"."
    with pytest.raises(ValueError, match="calls something with a list"):
        read_pickle(body)
