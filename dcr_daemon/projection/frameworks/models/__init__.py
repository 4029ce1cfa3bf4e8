"""What is known of a model from its `config.json` alone: its blocks, and how its checkpoint names and shapes them."""
