"""All of them."""

from __future__ import annotations

from sim.planted import engines, ledgers, links, publishers, ranks, replicas, retention, watchers
from sim.planted.bug import BUGS, Bug, planted

__all__ = ["BUGS", "Bug", "planted"]

_MODULES = (ledgers, links, publishers, ranks, retention, replicas, engines, watchers)
