"""Changes of canonical tensors to bytes and back.

`encode.ChunkEncoder` (one pass over the weights: detect, emit, sum, update the baseline) and `decode.open_chunk`
(the only reader of untrusted bulk bytes: bounded, a value or `CorruptChunk`). Pure and synchronous.
"""
