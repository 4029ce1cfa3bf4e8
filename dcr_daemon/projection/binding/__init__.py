"""A map bound to the live tensors of this process: readers for each block, and residual tensors."""
