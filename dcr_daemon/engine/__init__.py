"""Engines: what holds live weights and takes new versions. A subscriber opens one by URL and calls it through `port`.

`port` is the interface, with the records that go in and come out. `vllm_client` implements it over the socket of a
vLLM server (`messages` are the records on that socket), `directory` over a checkpoint directory. `deltas` and `staged`
read what the subscriber has staged; the directory engine and the vLLM plugin share them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dcr_daemon.errors import UsageError
from dcr_daemon.events import Emit, discard

if TYPE_CHECKING:
    from dcr_daemon.engine.port import Engine

__all__ = ["open_engine"]


def open_engine(url: str, *, state: Path, emit: Emit = discard) -> Engine:
    """The engine that `url` names: `vllm:///run/dcr/vllm.sock` or `dir:///models/current`.

    Nothing is opened yet: the first call is `attach`. `state` is the daemon's state directory, for engines whose
    clients must remember something between runs. These two do not use it: the directory engine keeps what it needs in
    the directory, and a server is asked. `emit` takes the progress of what an engine does in this process.

    Raises:
        UsageError: the URL names no engine DCR knows, or no absolute path.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme not in ("vllm", "dir"):
        raise UsageError(
            f"{url!r} is not the URL of an engine", hint="use vllm:///path/of/socket or dir:///path/of/checkpoint"
        )
    if parts.netloc or parts.query or parts.fragment or not path.startswith("/") or path == "/":
        raise UsageError(f"{url!r} does not name an absolute path", hint=f"write three slashes: {parts.scheme}:///path")
    if parts.scheme == "dir":
        from dcr_daemon.engine.directory.engine import DirectoryEngine

        return DirectoryEngine(Path(path), emit=emit)
    from dcr_daemon.engine.vllm_client import VllmEngine

    return VllmEngine(Path(path))
