"""Ids of replicas: any pod's name is one, and no two hosts get the same by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_daemon.errors import UsageError
from dcr_daemon.ledger import names
from dcr_daemon.store.keys import check_key
from dcr_daemon.subscribe.options import SubscribeOptions, replica_id

POD = "qwen3-235b-a22b-rollout-deployment-7d9c5b6f4b-x2x9q"


@pytest.mark.parametrize("name", ["a", "7", "node7", "gpu-node-7", "ip-10-0-0-1.ec2.internal", POD, "a" * 63])
def test_a_name_that_can_be_an_id_is_the_id(tmp_path, name):
    assert replica_id(name) == replica_id(name.upper()) == name
    assert SubscribeOptions(replica=name, state=tmp_path).replica == name


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", ".a", "a.", "..", "a/b", "a\n", "a" * 64, "\u00e9"])
def test_anything_else_is_no_id(tmp_path, name):
    with pytest.raises(UsageError, match="not the id of a replica"):
        SubscribeOptions(replica=name, state=tmp_path)


@pytest.mark.parametrize(
    ("one", "two"), [("a" * 80 + "-x2x9q", "a" * 80 + "-k8p4m"), ("a-b1", "ab-1"), ("a_b", "a-b"), ("_", "-")]
)
def test_names_that_differ_anywhere_have_different_ids(one, two):
    assert replica_id(one) != replica_id(two)


@given(st.text(min_size=1))
def test_every_host_has_an_id_that_names_a_directory_and_an_object(name):
    found = replica_id(name)
    assert SubscribeOptions(replica=found, state=Path("/x")).replica == found
    assert check_key(names.replica(found))


def test_a_host_without_a_name_needs_an_id():
    with pytest.raises(UsageError, match="no name"):
        replica_id("")
