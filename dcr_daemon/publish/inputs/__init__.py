"""What is handed over by a trainer: tensors in host or device memory, and whether they fit the layout."""
