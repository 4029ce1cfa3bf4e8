"""The engine port, and what implements it: a vLLM server through its socket, a checkpoint directory in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dcr_daemon.errors import UsageError

if TYPE_CHECKING:
    from dcr_daemon.engine.port import Engine

__all__ = ["open_engine"]


def open_engine(url: str, *, state: Path) -> Engine:
    """The engine that `url` names: `vllm:///run/dcr/vllm.sock` or `dir:///models/current`.

    Nothing is opened or asked yet: the first call is `attach`. `state` is the daemon's state directory, for engines
    whose clients must remember something between runs; these two need nothing: what a directory must know lies in it,
    and a server is asked.

    Raises:
        UsageError: the URL names no engine DCR knows, or no absolute path.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme not in ("vllm", "dir"):
        raise UsageError(f"{url!r} names no engine", hint="use vllm:///path/of/socket or dir:///path/of/checkpoint")
    if parts.netloc or parts.query or parts.fragment or not path.startswith("/") or path == "/":
        raise UsageError(f"{url!r} does not name an absolute path", hint=f"write three slashes: {parts.scheme}:///path")
    if parts.scheme == "dir":
        from dcr_daemon.engine.directory.engine import DirectoryEngine

        return DirectoryEngine(Path(path))
    from dcr_daemon.engine.vllm_client import VllmEngine

    return VllmEngine(Path(path))
