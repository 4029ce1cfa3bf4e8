"""Places where a stream lives: one port, a directory and S3-compatible buckets."""

from dcr_daemon.store.once import create_once
from dcr_daemon.store.open import open_store
from dcr_daemon.store.port import Entry, Outcome, Store
from dcr_daemon.store.probe import probe

__all__ = ["Entry", "Outcome", "Store", "create_once", "open_store", "probe"]
