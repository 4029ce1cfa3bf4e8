"""The ledger: the ordered, create-only records in the bucket, the only source of truth.

`ledger` appends and reads records, `slot` decides each, `fold` says which count. `history` looks back (seals, anchors,
routes), `objects` reads what records name and verifies it. `retention/` deletes what is no longer needed, `audit/` is
`dcr verify`. Publishers append; subscribers and tools only read.
"""
