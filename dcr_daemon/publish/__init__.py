"""From a trainer's weights to a sealed version: watch or module, diff, spool, upload, seal, anchor."""
