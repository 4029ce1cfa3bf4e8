"""A URL means a stream, or is refused with an example of one that does."""

from __future__ import annotations

import os

import pytest

from dcr_daemon.errors import UsageError
from dcr_daemon.store import open_store
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.s3.client import _is_aws


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "/tmp/x",
            "x",
            "file:",
            "file:///",
            "file:////",
            "file://host/x",
            "file:x",
            "file:///a/../b",
            "file:///a?b",
            "file:///a#b",
        ),
        *(
            "s3:",
            "s3://",
            "s3://bucket",
            "s3://bucket/",
            "s3://bu/x",
            "s3://bucket/a//b",
            "s3://bucket/a?x=1",
            "s3:///x",
        ),
        *("s3://bucket/../x", "s3://bucket/.x", "s3://key:secret@bucket/x", "s3://bucket:80/x", "s3://bucket/ä"),
        *("gs://bucket/x", "http://relay/x", "https://relay/x", "S3//bucket/x"),
    ],
)
async def test_other_urls_are_misuse_with_an_example(url: str) -> None:
    with pytest.raises(UsageError) as misuse:
        await open_store(url)
    assert "s3://bucket/prefix" in misuse.value.hint
    assert "file:///" in misuse.value.hint


async def test_a_relay_is_said_to_be_unavailable() -> None:
    with pytest.raises(UsageError, match="relay is not available in this version"):
        await open_store("https://relay.example/stream")


async def test_a_directory_url_is_taken_as_it_is_written(tmp_path) -> None:
    place = tmp_path / "with space"
    store = await open_store(place.as_uri())
    assert isinstance(store, FileStore)
    assert store.root == place
    assert store.url == place.as_uri()
    assert not place.exists()  # opening writes nothing
    await store.close()


async def test_s3_options_of_the_environment_do_not_stop_a_directory(tmp_path) -> None:
    store = await open_store(tmp_path.as_uri(), endpoint_url="http://127.0.0.1:1", region="x", profile="x")
    assert isinstance(store, FileStore)
    await store.close()


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9000", "ftp://x", "http://", "http://x?y"])
async def test_a_strange_endpoint_is_misuse(endpoint: str) -> None:
    with pytest.raises(UsageError, match="endpoint"):
        await open_store("s3://bucket/run", endpoint_url=endpoint)


async def test_an_unknown_profile_is_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(UsageError, match="nobody"):
        await open_store("s3://bucket/run", profile="nobody")


@pytest.mark.parametrize("given", ["argument", "environment"])
@pytest.mark.parametrize(("addressing", "path"), [("auto", True), ("path", True), ("virtual", False)])
async def test_an_endpoint_that_is_not_aws_gets_the_bucket_in_the_path(
    monkeypatch: pytest.MonkeyPatch, given: str, addressing: str, path: bool
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    endpoint = "https://s3.example.com"
    if given == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    store = await open_store(
        "s3://bucket/run", endpoint_url=endpoint if given == "argument" else None, addressing=addressing
    )
    url = await store._client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "k"})
    assert url.startswith("https://s3.example.com/bucket/k" if path else "https://bucket.s3.example.com/k")
    await store.close()


async def test_the_profile_may_ask_for_the_bucket_in_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "config").write_text(
        "[profile there]\nregion = r1\naws_access_key_id = a\naws_secret_access_key = s\n"
        "s3 =\n  addressing_style = virtual\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = await open_store("s3://bucket/run", endpoint_url="https://s3.example.com", profile="there")
    url = await store._client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "k"})
    assert url.startswith("https://bucket.s3.example.com/k")
    await store.close()


async def test_aws_gets_the_bucket_in_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    store = await open_store("s3://bucket/run", region="eu-west-1")
    url = await store._client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "k"})
    assert url.startswith(("https://bucket.s3.amazonaws.com/k", "https://bucket.s3.eu-west-1.amazonaws.com/k"))
    await store.close()


def test_aws_is_known_by_its_name() -> None:
    assert _is_aws("https://s3.eu-west-1.amazonaws.com")
    assert _is_aws("https://s3.cn-north-1.amazonaws.com.cn")
    assert not _is_aws("https://amazonaws.com.example.org")
