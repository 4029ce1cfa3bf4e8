"""The ranks of one training group: rank 0 opens, collects and seals; the others contribute their parts."""
