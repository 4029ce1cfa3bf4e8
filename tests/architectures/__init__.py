"""Which text architectures of vLLM are refitted exactly."""
