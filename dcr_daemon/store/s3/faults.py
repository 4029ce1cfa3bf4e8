"""What an error of the S3 client means to DCR: the one place that knows S3's error codes.

Missing                  the key does not exist (NoSuchKey only)
Occupied                 create-if-absent was refused, by ourselves earlier or by somebody else
Transient                may pass: no answer, 5xx, throttling, a conflict, damage in transit
Incompatible             access denied, no bucket, no such feature: an operator acts
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from http import HTTPStatus

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (botocore's own, not a subclass of the builtin)
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from dcr_daemon.errors import Incompatible, KeyNotFound
from dcr_daemon.store.retry import Transient

SDK_ERRORS = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    aiohttp.ClientError,
    HttpProcessingError,
    asyncio.TimeoutError,
    OSError,
)

#: of the SDK's own errors, those that time may heal; the rest are about parameters and configuration
_SDK_PASSING = (
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
_THROTTLED = {
    "SlowDown",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "TooManyRequestsException",
}
_PASSING = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "InvalidDigest",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "XAmzContentSHA256Mismatch",
}
_HINTS = {
    "AuthorizationHeaderMalformed": "give the bucket's region with --region or AWS_REGION",
    "ExpiredToken": "renew the session credentials, or use a role that renews itself",
    "InvalidAccessKeyId": "check the credentials, the profile and that they belong to this endpoint",
    "InvalidObjectState": "a lifecycle rule moved the object to an archive class: restore it and remove the rule",
    "InvalidToken": "renew the session credentials, or use a role that renews itself",
    "MethodNotAllowed": "check the endpoint: this answer does not come from an S3 bucket",
    "NoSuchBucket": "create the bucket, or correct the bucket name, the endpoint or the region",
    "NotImplemented": "use a store that honours If-None-Match: * on PUT; docs/STORES.md lists which do",
    "PermanentRedirect": "give the bucket's region with --region or AWS_REGION",
    "RequestTimeTooSkewed": "set this machine's clock: signatures are dated",
    "SignatureDoesNotMatch": "check the secret key, the region, and that no proxy rewrites requests",
}
#: what an operator has to allow for each operation
_GRANTS = {
    "create": "grant s3:PutObject on the stream's prefix",
    "delete": "grant s3:DeleteObject on the stream's data/, anchors/ and probe/; nothing but retention needs it "
    "(docs/STORES.md, Policies)",
    "get": "grant s3:GetObject and s3:ListBucket on the stream's prefix; without s3:ListBucket S3 answers 403 even for "
    "a key that does not exist",
    "list": "grant s3:ListBucket on the bucket, for the stream's prefix",
    "overwrite": "grant s3:PutObject on the stream's prefix",
}
_DENIED = "AccessDenied"
#: what a store says of credentials that it does not know now; they may be known again, or renew themselves
_CREDENTIALS = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
_NO_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or run where a role is attached"


class Occupied(Exception):
    """412 Precondition Failed."""


class Unranged(Exception):
    """416 Range Not Satisfiable: the object is shorter than what we already have of it."""


def translate(error: BaseException, *, operation: str, key: str, where: str, accepted: bool = False) -> Exception:
    """The exception to raise for `error`, one of `SDK_ERRORS`.

    Args:
        operation: of the port, for the hint.
        key: the key that was asked for, for `KeyNotFound`.
        where: bucket and key (or prefix) in words, for people.
        accepted: this client's credentials were accepted before. Then their refusal may pass: a daemon that served for
            weeks must not end because a token ran out for a minute.
    """
    if isinstance(error, ClientError):
        return _from_answer(error, operation, key, where=where, accepted=accepted)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return Incompatible(f"{where}: no usable AWS credentials: {error}", hint=_NO_CREDENTIALS)
    if isinstance(error, SSOError | TokenRetrievalError):
        return Incompatible(f"{where}: the SSO session is not valid: {error}", hint="run `aws sso login`")
    if isinstance(error, SSLError) and isinstance(error.kwargs.get("error"), ssl.CertificateError):
        return Incompatible(
            f"{where}: the endpoint's certificate is not trusted: {error}",
            hint="name the certificate authority's file in AWS_CA_BUNDLE",
        )
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, BotoCoreError) and not isinstance(error, _SDK_PASSING):
        return Incompatible(f"{where}: the S3 client refused: {said}", hint="check the AWS configuration files")
    return Transient(said)


def _from_answer(error: ClientError, operation: str, key: str, *, where: str, accepted: bool) -> Exception:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    details = error.response.get("Error", {})
    code, message = str(details.get("Code", status)), str(details.get("Message", ""))
    said = f"{status} {code}" + (f": {message}" if message else "")
    if code == "NoSuchKey":
        return KeyNotFound(key)
    if status == HTTPStatus.PRECONDITION_FAILED or code == "PreconditionFailed":
        return Occupied(where)
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return Unranged(where)
    if accepted and code in _CREDENTIALS:
        return Transient(f"{said}; {_HINTS[code]}; a restart reads static credentials anew")
    if code in _THROTTLED or status == HTTPStatus.TOO_MANY_REQUESTS:
        return Transient(said, throttled=True)
    refused = code in _HINTS or code == _DENIED or status == HTTPStatus.NOT_IMPLEMENTED
    passing = code in _PASSING or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT) or status >= 500
    # A 404 that S3 did not sign with a code of its own comes from something in between, which decides nothing.
    if not refused and (passing or status == HTTPStatus.NOT_FOUND or status < 300):
        return Transient(said)
    return Incompatible(f"{where}: the store refused: {said}", hint=_hint(operation, code, status))


def _hint(operation: str, code: str, status: int) -> str:
    if code in _HINTS:
        return _HINTS[code]
    if code == _DENIED or status == HTTPStatus.FORBIDDEN:
        return _GRANTS[operation]
    if status in (HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.TEMPORARY_REDIRECT):
        return _HINTS["PermanentRedirect"]
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return _HINTS["NotImplemented"]
    return "check the URL, the endpoint and the credentials; docs/STORES.md tells what a store must offer"


def refused_keys(errors: Iterable[dict[str, str]], *, where: str) -> tuple[set[str], dict[str, Incompatible]]:
    """Keys of a DeleteObjects answer that are worth another try, and those that were refused for good, with why."""
    again, refused = set[str](), dict[str, Incompatible]()
    for error in errors:
        key, code = error.get("Key", ""), error.get("Code", "")
        if code == _DENIED or code in _HINTS:
            said = f"delete {where}: the store refused: {code} for {key}"
            refused[key] = Incompatible(said, hint=_hint("delete", code, HTTPStatus.OK))
        elif code != "NoSuchKey":
            again.add(key)
    return again, refused
