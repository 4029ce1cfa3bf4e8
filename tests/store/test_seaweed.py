"""What only a real server can tell: signatures are checked and buckets must exist."""

from __future__ import annotations

import pytest

from dcr_daemon.errors import Incompatible
from dcr_daemon.store import open_store, probe

pytestmark = pytest.mark.seaweed


@pytest.mark.parametrize(
    ("name", "code"), [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "Sig")]
)
async def test_wrong_credentials_are_refused_with_a_hint(s3_stream: str, monkeypatch, name: str, code: str) -> None:
    monkeypatch.setenv(name, "wrong")
    store = await open_store(s3_stream)
    for request in (store.create("ledger/1", b"x"), store.get("ledger/1", limit=9), probe(store)):
        with pytest.raises(Incompatible, match=code) as refused:
            await request
        assert refused.value.hint
    await store.close()


async def test_a_missing_bucket_is_refused_with_a_hint(s3_stream: str) -> None:
    store = await open_store("s3://no-such-bucket/run")
    for request in (store.get("ledger/1", limit=9), anext(store.list(""))):
        with pytest.raises(Incompatible, match="NoSuchBucket") as refused:
            await request
        assert "create the bucket" in refused.value.hint
    await store.close()
