"""One rank's weights bound to its map.

In come the weights of a step (`bind.live`, then `Live.rebind`); out go the rank's blocks (blocks.py), their bits
(reader.py), and whole tensors that no rank can project (residual.py). `publish.group.projected` calls it at every step.
"""
