"""What one rank holds of a whole tensor, as regions: DTensors, ZeRO-3 partitions, plain tensors and their copies.

In come local tensors and their placements; out go regions from local to whole tensors. `binding` and `probes` call it;
nothing here communicates.
"""
