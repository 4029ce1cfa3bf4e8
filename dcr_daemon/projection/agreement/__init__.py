"""The ranks agree that every element has exactly one source, before the first diff."""
