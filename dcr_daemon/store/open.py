"""Opens the store that a URL names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from dcr_daemon.errors import UsageError
from dcr_daemon.events import Emit, discard
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.keys import is_key
from dcr_daemon.store.port import Store

if TYPE_CHECKING:
    from dcr_daemon.store.s3.client import Addressing

_EXAMPLES = "a stream is file:///absolute/directory or s3://bucket/prefix"


async def open_store(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    addressing: Addressing = "auto",
    emit: Emit = discard,
) -> Store:
    """Open the store of a stream; nothing is written, and a bucket is not asked anything yet.

    The AWS options mean nothing for a directory and are ignored there: environments set them for every command.

    Args:
        url: `file:///absolute/directory` or `s3://bucket/prefix`.
        endpoint_url: of an S3-compatible service; default from the usual AWS environment, else AWS itself.
        region: default from the AWS environment or profile, else `us-east-1`.
        profile: a profile of the AWS configuration files.
        addressing: `path` or `virtual` (bucket in the host name); `auto` is what the profile says, else virtual on
            AWS and path elsewhere.
        emit: gets one `StoreRequest` per request.

    Raises:
        UsageError: the URL or an option cannot mean a stream.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FileStore(_directory(url, parts), emit=emit)
    if parts.scheme == "s3":
        bucket, prefix = _bucket_and_prefix(url, parts)
        # Imported here: a file:// stream must not pay for the AWS SDK.
        from dcr_daemon.store.s3.store import S3Store

        return await S3Store.open(
            bucket,
            prefix,
            endpoint_url=_endpoint(endpoint_url),
            region=region,
            profile=profile,
            addressing=addressing,
            emit=emit,
        )
    if parts.scheme in ("http", "https"):
        raise UsageError(f"{url}: a relay is not available in this version", hint=_EXAMPLES)
    raise UsageError(f"not the URL of a stream: {url!r}", hint=_EXAMPLES)


def _directory(url: str, parts: SplitResult) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(f"{url}: a file URL has an empty host and only a path", hint=_EXAMPLES)
    if not path.is_absolute() or not path.name or ".." in path.parts or "\0" in str(path):
        raise UsageError(f"{url}: the directory must be absolute, not the root, and without '..'", hint=_EXAMPLES)
    return path


def _bucket_and_prefix(url: str, parts: SplitResult) -> tuple[str, str]:
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if parts.query or parts.fragment:
        raise UsageError(f"{url}: an s3 URL has no query and no fragment", hint=_EXAMPLES)
    if not is_key(bucket) or not 3 <= len(bucket) <= 63:
        raise UsageError(f"{url}: {bucket!r} is not a bucket name", hint=_EXAMPLES)
    if not is_key(prefix):
        raise UsageError(
            f"{url}: {prefix!r} is not a prefix",
            hint=f"{_EXAMPLES}; the prefix is not empty, and its names are ASCII letters, digits, '.', '_' and '-'",
        )
    return bucket, prefix


def _endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"not an endpoint URL: {url!r}", hint="for example https://s3.example.com or http://127.0.0.1:9000"
        )
    return url
