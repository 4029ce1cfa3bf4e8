"""A model as its `config.json` describes it: its blocks, and how its checkpoint names and shapes them.

In comes a configuration (families.py), out goes an `Architecture` (architecture.py), which `frameworks.megatron` and
`preview` read.
"""
