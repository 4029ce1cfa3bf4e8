"""Object stores: one port (`port.Store`), implemented by a directory (`file`) and by S3-compatible buckets (`s3`).

`open_store` makes one from a URL, `probe` proves at start-up that it honours create-if-absent. `put_if_absent`,
`retry` and `poller` are the loops that everything above the store uses.
"""

from dcr_daemon.store.open import open_store
from dcr_daemon.store.port import Entry, Outcome, Store
from dcr_daemon.store.probe import probe
from dcr_daemon.store.put_if_absent import put_if_absent

__all__ = ["Entry", "Outcome", "Store", "open_store", "probe", "put_if_absent"]
