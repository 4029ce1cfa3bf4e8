"""Readers of the small files that a subscriber has staged for an engine: a layout, and the vectors of versions."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.disk import disk_error, out_of_handles
from dcr_daemon.errors import Corrupt, EngineRefused, ResourceExhausted


def read_vector(path: str | Path, layout: Layout) -> Vector:
    """Read a version's vector: one u64 (little-endian) per tensor of the layout.

    Raises:
        EngineRefused, ResourceExhausted: the file cannot be read, see `unreadable`.
        Corrupt: its length is not that of a vector of this layout.
    """
    body = read_staged(path)
    if len(body) != 8 * len(layout):
        raise Corrupt(f"{path} holds {len(body)} bytes, a vector of this layout has {8 * len(layout)}")
    return np.frombuffer(body, dtype="<u8").astype(np.uint64)


def read_layout(path: str | Path, digest: str) -> Layout:
    """Read a layout object.

    Raises:
        EngineRefused, ResourceExhausted: the file cannot be read, see `unreadable`.
        Corrupt: it is not the layout with this digest.
    """
    layout = Layout.decode(read_staged(path))
    if layout.digest != digest:
        raise Corrupt(f"{path} is layout {layout.digest[:12]}, not {digest[:12]}", hint="fetch it again")
    return layout


def read_staged(path: str | Path) -> bytes:
    """Read a whole staged file. Raises what `unreadable` returns if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: OSError) -> EngineRefused | ResourceExhausted:
    """The error for a staged file that cannot be read.

    It is `EngineRefused` if this process does not see the file. Otherwise its descriptors, its memory or the disk are
    at fault, which says nothing about the version: a refusal would count towards poisoning it (must P4).
    """
    if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
        return EngineRefused(
            f"cannot read {path} on {socket.gethostname()}: {error.strerror}",
            hint="the server must see the subscriber's staging directory under the same path",
        )
    if out_of_handles(error):
        return disk_error(error, Path(path))
    return ResourceExhausted(f"cannot read {path}: {error.strerror or error}", hint="check that disk")
