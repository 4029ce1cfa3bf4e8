"""How a framework's own names and layouts lead to canonical tensors: transformers, torchtitan, Megatron."""
