"""What one subscriber was given and made at its start, in one object for those that work with it."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.subscribe.fetch.anchors import AnchorFiles
from dcr_daemon.subscribe.fetch.loader_computed import LoaderComputed
from dcr_daemon.subscribe.fetch.stage import Stage
from dcr_daemon.subscribe.follower import LedgerFollower
from dcr_daemon.subscribe.options import SubscribeOptions
from dcr_daemon.subscribe.scrub import Scrub
from dcr_daemon.subscribe.status import StatusWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberContext:
    """One subscriber's parts; `subscribe.daemon` makes them."""

    options: SubscribeOptions
    ledger: Ledger
    objects: Objects
    layout: Layout
    stage: Stage
    anchors: AnchorFiles
    computed: LoaderComputed
    follower: LedgerFollower
    status: StatusWriter
    scrub: Scrub
