"""What several benchmarks share: a slow link, a trainer, the machine's name, plots."""
