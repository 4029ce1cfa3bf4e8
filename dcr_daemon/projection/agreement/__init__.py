"""The ranks agree that every canonical element has exactly one source, before the first diff.

In comes one declaration per rank (declaration.py), out goes the verdict that all follow (gate.py); coverage.py does the
counting. `publish.group.projected` declares on every rank and judges on rank 0.
"""
