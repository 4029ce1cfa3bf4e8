"""Tests of a map with small synthetic tensors, before real weights are read through it.

In come a rank's tensors (shapes, dtypes and placements), its map and its framework's export; out go residual names with
reasons (`self_check.Probed`), which the rank declares. `publish.group.projected` runs them once per run.
"""
