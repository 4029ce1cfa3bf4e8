"""What a subscriber keeps on disk for its engine: fetched, verified, bounded in bytes.

Input: records. Output: paths of files. `stage` keeps chunks and vectors, `prefetch` fills it while a version is still
open, `anchors` downloads complete versions, `loader_computed` keeps the tensors that an engine's loader computes with.
Called by the driver, the ledger's follower and `materialize`.
"""
