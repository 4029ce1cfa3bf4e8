"""The S3 client as DCR needs it: no retries of its own anywhere, the usual AWS configuration, any endpoint.

`must L0`: a conditional write that the SDK repeats by itself turns "won" into "lost". Three layers would do so, and
all three are switched off here: botocore's retry handler, botocore's Expect: 100-continue (which waits), and
aiohttp's second try on a connection that the server had closed.

A connection on which nothing is acknowledged for some seconds is ended by the kernel, where it can (Linux). Nothing
else sees an upload stall: the last bytes of a body lie in the kernel's buffer, which is kept small for the same reason.
"""

from __future__ import annotations

import base64
import hashlib
import socket
from contextlib import AsyncExitStack
from typing import Any, Literal
from urllib.parse import urlsplit

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import BotoCoreError, ProfileNotFound
from botocore.handlers import add_expect_header

from dcr_daemon.errors import Incompatible, UsageError
from dcr_daemon.store.s3.attempt import UploadBody

CONNECT_SECONDS = 10.0
READ_SECONDS = 90.0  #: longer than any window of a request (`attempt.Try`), which ends it earlier
STALL_SECONDS = 10.0  #: a connection on which nothing is acknowledged for so long is ended
UNSENT_BYTES = 64 << 10  #: of an upload, not yet sent, that the kernel takes at most
_TCP_NOTSENT_LOWAT = 25  #: Linux's number of the option, which Python does not name

Addressing = Literal["auto", "path", "virtual"]


class _OneTry(AIOHTTPSession):  # type: ignore[misc]
    """An HTTP session that sends every request at most once."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        # aiohttp repeats an idempotent request, PUT included, if a kept-alive connection turns out closed. It has
        # no public switch; tests/store/test_s3.py fails if this attribute ever stops being the switch.
        session._retry_connection = False
        return session

    def _create_connector(self, proxy_url: str | None) -> aiohttp.TCPConnector:
        self._connector_args["socket_factory"] = _open_socket
        connector: aiohttp.TCPConnector = super()._create_connector(proxy_url)
        return connector


def _open_socket(address: Any) -> socket.socket:
    """A socket whose uploads stall visibly: see the module."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))
        opened.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return opened


async def open_client(
    stack: AsyncExitStack,
    *,
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    addressing: Addressing,
    connections: int,
) -> Any:
    """An aiobotocore S3 client that lives as long as `stack`.

    Raises:
        UsageError: no such profile.
        Incompatible: the AWS configuration files cannot be used.
    """
    try:
        session = aioboto3.Session(profile_name=profile, region_name=region)
        style: str = addressing
        if addressing == "auto":
            style = _configured_style(session) or ("path" if endpoint_url else "auto")
        client = await _client(stack, session, endpoint_url, style, connections)
        if style == "auto" and not _is_aws(client.meta.endpoint_url):
            # The endpoint came from AWS_ENDPOINT_URL or a profile, which only the finished client knows.
            client = await _client(stack, session, endpoint_url, "path", connections)
    except ProfileNotFound as error:
        raise UsageError(str(error), hint="list the profiles with `aws configure list-profiles`") from error
    except (BotoCoreError, ValueError) as error:
        raise Incompatible(f"the AWS configuration cannot be used: {error}", hint="check ~/.aws/config") from error
    client.meta.events.unregister("before-call.s3", add_expect_header)
    client.meta.events.register("before-call.s3.DeleteObjects", _add_content_md5)
    client.meta.events.register("before-send.s3", _begin_upload)
    return client


def _add_content_md5(params: dict[str, Any], **_: Any) -> None:
    """Older stores want this header on a multi-object delete; the SDK sends a newer checksum only."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _begin_upload(request: Any, **_: Any) -> None:
    if isinstance(request.body, UploadBody):
        request.body.begin()


async def _client(
    stack: AsyncExitStack, session: aioboto3.Session, endpoint_url: str | None, style: str, connections: int
) -> Any:
    config = AioConfig(
        http_session_cls=_OneTry,
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The digests that matter are ours, from the seal down; servers mangle the SDK's checksum trailers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": style},
        user_agent_extra="dcr",
    )
    return await stack.enter_async_context(
        session.client("s3", endpoint_url=endpoint_url, region_name=session.region_name or "us-east-1", config=config)
    )


def _configured_style(session: aioboto3.Session) -> str | None:
    """`s3 = addressing_style = …` of the profile, which some providers ask their users to set."""
    section = session._session.get_scoped_config().get("s3")
    return section.get("addressing_style") if isinstance(section, dict) else None


def _is_aws(endpoint_url: str) -> bool:
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
