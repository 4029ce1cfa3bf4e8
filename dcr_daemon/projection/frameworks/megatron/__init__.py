"""Megatron-core: which pieces of the checkpoint each rank's parameters hold, in closed form.

`model.parameters` lists a whole model's parameters from its architecture; `grid.Grid` says which of them a rank has;
`splits` says which pieces; `shards.of_rank` puts the three together, `live.shards_of` does so for a model in memory.
"""
