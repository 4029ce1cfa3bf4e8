"""Bits of canonical boxes out of this rank's own tensors, by the algebra alone.

`blocks` cuts what a rank owns into boxes of bounded size; `Reader.read` gives the bits of any box that the rank holds,
in the canonical dtype and in the box's own row-major order. A box that lies in one run of one tensor costs nothing but
its cast; any other is copied once.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.projection.live import Live
from dcr_daemon.projection.plan import Map


def blocks(mapped: Map, layout: Layout, limit: int) -> list[tuple[int, Box]]:
    """The boxes that a rank owns, as (layout index, box), each of at most `limit` bytes of canonical elements.

    Every element that the map is the source of is in one of them, once. The order is that of the map's shards, so that
    a local tensor is read from its beginning to its end; the same map gives the same list.
    """
    raise NotImplementedError


class Reader:
    """Reads one rank's tensors. Thread-safe: any number of threads may read while nobody binds."""

    def __init__(self, live: Live, layout: Layout) -> None:
        raise NotImplementedError

    def bind(self, live: Live) -> None:
        """Read these tensors from now on: those of the next step, bound to the same map."""
        raise NotImplementedError

    def plan(self, blocks: Iterable[tuple[int, Box]]) -> None:
        """Work out ahead of time how each of these boxes is read."""
        raise NotImplementedError

    def read(self, tensor: int, box: Box) -> Bits:
        """The bits of `box` in canonical tensor number `tensor`: flat unsigned lanes, in the box's row-major order.

        They may be the tensor's own memory, or a buffer of the calling thread: valid until the weights change or this
        thread reads again, and not to be written to.

        Raises:
            Incompatible: this rank does not hold the whole box.
        """
        raise NotImplementedError
