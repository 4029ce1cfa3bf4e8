"""The `config.json` of the model that a stream carries. It explains the names of checkpoints that a framework wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dcr_daemon.errors import DcrError
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.untrusted import load_json

NAME = "config.json"
LIMIT = 16 << 20  #: bytes


async def read_config(ledger: Ledger, base: Path | None) -> dict[str, Any] | None:
    """That of the base checkpoint if one was given, else that of the newest anchor; None if neither has a readable one.

    Without it, names that only it explains are refused where they are met.
    """
    try:
        config = load_json(_of_base(base) if base else await _of_anchor(ledger))
    except (DcrError, OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _of_base(base: Path) -> bytes:
    path = base / NAME
    return path.read_bytes() if path.is_file() and path.stat().st_size <= LIMIT else b""


async def _of_anchor(ledger: Ledger) -> bytes:
    objects = Objects(ledger.store, floor=lambda: ledger.state.floor)
    async for anchor in ledger.history.anchors_back():
        index = await objects.read_anchor_index(anchor)
        for ref in index.extras:
            if Path(ref.key).name == NAME:
                return await objects.read_file(ref, anchor.version)
        break
    return b""
