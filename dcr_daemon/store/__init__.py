"""Places where a stream lives: one port, a directory and S3-compatible buckets."""

from dcr_daemon.store.open import open_store
from dcr_daemon.store.port import Entry, Outcome, Store
from dcr_daemon.store.probe import probe
from dcr_daemon.store.put_if_absent import put_if_absent

__all__ = ["Entry", "Outcome", "Store", "open_store", "probe", "put_if_absent"]
