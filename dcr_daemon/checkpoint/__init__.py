"""Checkpoints as files: safetensors headers and data, Hugging Face directories, files in pieces, blocks of a model.

In come paths or bytes from anybody, which are checked before anything is allocated; out go layouts, bits and sums. The
publisher, the subscriber, the engines and `dcr verify` call this package.

    safetensors          one file: header, views, reads, writer
    directory            a checkpoint directory: read, and written all or nothing
    weight_files, tied   which of its files hold the weights; whether its head may be its embedding
    blocks, reader       a model cut into blocks: their sums, and reads of boxes from an open checkpoint
    pieces, contents     an anchor's files: how they are cut, and the table of what is in each
"""
