"""One version under construction: changes found, chunks uploaded, the future a caller holds."""
