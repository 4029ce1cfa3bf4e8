"""All of them."""

from __future__ import annotations

from sim.planted import engines, ledgers, publishers, ranks, replicas, retention, watchers
from sim.planted.bug import BUGS, Bug, planted

__all__ = ["BUGS", "Bug", "planted"]

_MODULES = (ledgers, publishers, ranks, retention, replicas, engines, watchers)
