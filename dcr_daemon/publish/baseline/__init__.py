"""The canonical values of the last sealed version in host memory: kept, restored at start, checked between updates.

In go a checkpoint, anchors and chunks (restore.py, rebuild.py) and the segments of sealed updates; out come the old
bits that an attempt diffs against (baseline.py). `publish.group` owns one baseline per rank.
"""
