"""No key leaves its stream."""

from __future__ import annotations

import posixpath

from hypothesis import example, given
from hypothesis import strategies as st

from dcr_daemon.ledger import names
from dcr_daemon.store.keys import KEY_BYTES, NAME_BYTES, check_prefix, is_key


@given(st.text(alphabet=st.sampled_from("a.-_/Z0\\\0\n ~ä%"), max_size=12))
@example("a\n")
@example("a/..")
def test_a_key_means_one_place_inside_the_stream(text: str) -> None:
    if is_key(text):
        assert text.isascii()
        assert posixpath.normpath(f"/stream/{text}") == f"/stream/{text}"
        assert not any(name.startswith(".") for name in text.split("/"))
        for end in range(len(text)):
            head = text[:end]
            if not head.endswith(("/", "")) or head == "":
                continue
            check_prefix(head)


def test_lengths_are_bounded() -> None:
    assert is_key("a" * NAME_BYTES)
    assert not is_key("a" * (NAME_BYTES + 1))
    assert is_key("/".join(["a" * 127] * 4))
    assert not is_key("/".join(["a" * 127] * 4) + "/" + "a" * (KEY_BYTES - 511))


def test_every_name_of_a_stream_is_a_key() -> None:
    for key in (
        names.record(0),
        names.record(10**16 - 1),
        names.layout("ab" * 32),
        names.chunk(10**12, 10**12, "a" * 32, 4095, "b" * 32, 10**6),
        names.part(1, 2, "g", 0, "n"),
        names.sums(1, 2, "g", 0, "n"),
        names.fail(1, 2, "g", 0, "n"),
        names.vector(1, 2),
        names.anchor(1, 2) + "model-00001-of-00002.safetensors",
        names.replica("r" * 32),
    ):
        assert is_key(key), key
