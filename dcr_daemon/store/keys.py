"""Which keys are allowed, the same for every store.

Records that come from a bucket contain keys, so keys are hostile until checked: no key that passes here can leave the
stream's prefix, name a hidden file, or mean different things to a file system and to a bucket.
"""

from __future__ import annotations

import re

from dcr_daemon.errors import UsageError

KEY_BYTES = 512  #: S3 allows 1024 for prefix and key together
NAME_BYTES = 200  #: file systems allow 255 per name; the rest is kept for suffixes of tools

_NAME = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{NAME_BYTES - 1}}}"
_KEY = re.compile(rf"{_NAME}(?:/{_NAME})*")
_PREFIX = re.compile(rf"(?:{_NAME}/)*(?:{_NAME})?")
_RULE = "a key is names of ASCII letters, digits, '.', '_' and '-' joined by '/'; no name begins with '.' or '-'"


def is_key(text: str) -> bool:
    """True if `text` may name an object of a stream."""
    return len(text) <= KEY_BYTES and _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """`key` itself. Raises `UsageError` if it may not name an object."""
    if not is_key(key):
        raise UsageError(f"not a key of a stream: {key!r}", hint=_RULE)
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` itself (empty means everything). Raises `UsageError` if no key can begin with it."""
    if len(prefix) > KEY_BYTES or _PREFIX.fullmatch(prefix) is None:
        raise UsageError(f"not the beginning of any key: {prefix!r}", hint=_RULE)
    return prefix
