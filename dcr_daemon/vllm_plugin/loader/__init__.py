"""Runs in each worker process: finds out where vLLM's own loader puts canonical elements, and what it computes.

Input: a live model and a layout. Output: a `weights.placement.Placement`, or the reasons for refusing it. Called by
`worker.attachment` at attach (`place_model`), and at each change of a tensor that the loader computes with
(`computed`).
"""
