"""`dcr subscribe`: one replica kept at the newest sealed version, until told to stop.

Durable order: high-water mark, staged and verified, prepared, swapped, status. The supervisor that restarts what
may be restarted lives here; what one version takes is in `drive`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.engine.port import Engine
from dcr_daemon.events import Emit
from dcr_daemon.store.port import Store

STAGING_LIMIT = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """What an operator may choose.

    `state`: directory of the high-water marks and of staging if there is no tmpfs. `staging`: where chunks wait,
    None for `/dev/shm/dcr-<replica>` where that exists. `staging_limit`: bytes staged at most. `once`: reach the
    newest seal read at the start, then return. `pin`: serve this version and never a newer one. `poll`: seconds
    between looks at the ledger's tail. `patience`: seconds an absent engine is waited for with `once`.
    """

    replica: str
    state: Path
    staging: Path | None = None
    staging_limit: int = STAGING_LIMIT
    once: bool = False
    pin: int | None = None
    poll: float = 1.0
    patience: float = 60.0


async def run_subscribe(options: SubscribeOptions, store: Store, engine: Engine, emit: Emit) -> None:
    """Keep `engine` at the newest sealed version of the stream in `store` (or reach it once).

    Returns when cancelled, or with `once` when the newest seal read at the start is served.

    Raises:
        Fenced: another subscriber has attached to this engine since; do not restart.
        EngineRefused: the engine cannot take this stream, with every reason named.
        Incompatible: the stream has another format or layout than engine or state know.
        NotFound: with `once`, there is no stream.
        Corrupt: the ledger does not extend the one remembered here (must T1).
    """
    raise NotImplementedError
