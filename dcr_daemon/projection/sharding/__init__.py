"""How one tensor is cut over ranks: DTensors, ZeRO partitions, intervals, maps of names."""
