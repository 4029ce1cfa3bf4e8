"""The S3 client as DCR needs it: no retries of its own anywhere, the usual AWS configuration, any endpoint.

`must L0`: a conditional write that the SDK repeats by itself turns "won" into "lost". Three layers would do so, and
all three are switched off here: botocore's retry handler, botocore's Expect: 100-continue (which waits), and
aiohttp's second try on a connection that the server had closed.
"""

from __future__ import annotations

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

CONNECT_SECONDS = 10.0
READ_SECONDS = 20.0  #: longest silence in the middle of an answer

Addressing = Literal["auto", "path", "virtual"]


class _OneTry(AIOHTTPSession):  # type: ignore[misc]
    """An HTTP session that sends every request at most once."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        # aiohttp repeats an idempotent request, PUT included, if a kept-alive connection turns out closed. It has
        # no public switch; tests/store/test_s3.py fails if this attribute ever stops being the switch.
        session._retry_connection = False
        return session


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
    return client


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
