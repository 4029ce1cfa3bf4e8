"""Direct projection: which canonical elements a local tensor holds, and how its values become canonical ones.

Every source of layouts (DTensors, ZeRO partitions, transformers modules, checkpoint files) answers in the same words:
shards (`plan.Shard`), each a local tensor with its value function and its regions. Pure and synchronous; nothing here
communicates, and nothing allocates a tensor of full size.
"""
