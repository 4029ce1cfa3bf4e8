"""Changes of canonical tensors as bytes, and back.

In go boxes of old and new bits (`encode.ChunkEncoder`: one pass that finds the changes, sums them, updates the baseline
and fills a chunk); out come chunks, immutable objects. `decode.open_chunk` reads them: the only reader of untrusted
bulk bytes, bounded in memory, which gives a value or raises `CorruptChunk`. The publisher's attempt encodes; replicas,
engines, restore and `dcr verify` decode. Pure and synchronous.
"""
