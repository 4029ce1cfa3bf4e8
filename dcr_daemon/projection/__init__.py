"""Direct projection: which canonical elements a local tensor holds, and how its values become canonical ones.

In comes what a trainer has on one rank (a module, a state dict, Megatron's chunks, files of a sharded checkpoint); out
go shards (`region_map.Shard`: a local tensor with its value function and its regions) and the bits of their canonical
boxes. `publish.group.projected` and the watcher of sharded checkpoints call this package, and `dcr plan` predicts it.
Synchronous; no tensor of full size is allocated, and only probes and exports communicate.

    frameworks/          what a framework's own export does: transformers, torchtitan, Megatron; families of models
    sharding/            what one rank holds of a tensor: DTensors, ZeRO-3, plain tensors and their copies
    files/               the same for pieces in files
    binding/             one rank's weights bound to its map: attribution, blocks, reader, residual exports
    probes/              tests of a map on small synthetic tensors, before real weights are read through it
    agreement/           the ranks' declarations, and the verdict on them
    region_map, values, owners, tracing, mismatches, host, preview    what these share
"""
