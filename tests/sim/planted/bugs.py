"""All of them."""

from __future__ import annotations

from sim.planted import of_engines, of_ledgers, of_publishers, of_ranks, of_replicas, of_retention
from sim.planted.bug import BUGS, Bug, planted

__all__ = ["BUGS", "Bug", "planted"]

_ROOMS = (of_ledgers, of_publishers, of_ranks, of_retention, of_replicas, of_engines)
