"""What a framework's own export does to its tensors: transformers and torchtitan by tracing it, Megatron in closed
form.

In come models, adapters or configurations; out go conversions (`tracing.Conversion`) and maps. `binding` calls it for
live weights, `preview` for `dcr plan`.
"""
