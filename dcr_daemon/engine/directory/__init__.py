"""The engine that keeps a checkpoint directory at one version, in place: files, journal, commit marker."""
