"""Which objects of a stream may be deleted, and deleting them (must L5).

`plan` decides, without I/O, from what the ledger and a LIST say; `collector` reads both, raises the floor and deletes.
Called by a publisher after a seal, and by `dcr gc`.
"""
