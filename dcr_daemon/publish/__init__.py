"""From new weights to a sealed version: watch or module, diff, spool, upload, seal, anchors."""
