"""Real Megatron-core models on CPUs, and Megatron-Bridge's own conversion of them. Nothing of DCR is in it."""
