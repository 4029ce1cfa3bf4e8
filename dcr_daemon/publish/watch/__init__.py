"""Watches a directory in which a trainer writes checkpoints, and publishes each of them.

`dcr publish --watch` calls `watcher.run_watch`. In: files on disk. Out: versions, through a leader of `publish.group`.
"""
