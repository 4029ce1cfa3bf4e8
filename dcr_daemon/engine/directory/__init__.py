"""A checkpoint directory as an engine: staged deltas or anchors come in, current safetensors files come out.

`engine.DirectoryEngine` implements the engine port, and says which module does which call. `dcr subscribe --engine
dir:///path` and `dcr materialize` use it. `checkout` has the files and the order of durable steps (must E8), `journal`
the bytes of the redo journal.
"""
