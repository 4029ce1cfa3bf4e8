"""When a version begins and how it ends, on each rank of a group of one or many.

In: attempts to open and weights to diff, from `publisher` and `watch`. Out: records in the ledger, and the fate of each
attempt. Begin with `coordinator`: `leader` (rank 0, with `peers`) and `member` (the others) are its two kinds;
`opening` makes them. `collect` and `join` bring the ranks' contributions together; `projected` and `update_steps` are
the sharded path; `anchors` and `retention` run after a seal.
"""
