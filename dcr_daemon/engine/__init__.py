"""What holds live weights: the port, a vLLM server behind its socket, a checkpoint directory."""
