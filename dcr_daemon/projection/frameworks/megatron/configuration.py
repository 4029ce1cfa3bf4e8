"""The check that the given architecture is the live model's, by the configuration that Megatron's modules carry.

Shapes are not enough: eight heads of 64 and four of 128 have the same shapes and another order of rows. Megatron's
modules carry the configuration that they were built from; where one does, every number that orders rows has to be the
architecture's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.frameworks.models.architecture import Architecture, Attention, DeltaNet, Latent, Mamba

HINT = "read_architecture(config.json of the base checkpoint) gives that of the model that it was built from"


def check_configuration(chunks: Sequence[Any], architecture: Architecture) -> None:
    """Compare with the configuration of each model chunk, as far as it has one.

    Raises:
        Incompatible: it is another model's; with every number that differs.
    """
    expected = dict(_numbers(architecture))
    for chunk in chunks:
        config = getattr(chunk, "config", None)
        pairs = ((name, getattr(config, name, None), number) for name, number in expected.items())
        wrong = [f"{name} is {is_} in the model and {number} in the architecture" for name, is_, number in pairs
                 if isinstance(is_, int) and is_ != number]  # fmt: skip
        if wrong:
            raise Incompatible(f"the architecture is another model's: {'; '.join(wrong)}", hint=HINT)


def _numbers(architecture: Architecture) -> Iterator[tuple[str, int]]:
    """What Megatron's configuration calls the numbers that order rows. A model's mixers of one kind are alike."""
    yield "hidden_size", architecture.hidden
    for layer in architecture.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            yield "num_attention_heads", mixer.heads
            yield "num_query_groups", mixer.groups
            yield "kv_channels", mixer.head
            yield "attention_output_gate", mixer.gate
        elif isinstance(mixer, Latent):
            yield "num_attention_heads", mixer.heads
        elif isinstance(mixer, Mamba):
            yield "mamba_num_heads", mixer.heads
            yield "mamba_head_dim", mixer.head
            yield "mamba_num_groups", mixer.groups
            yield "mamba_state_dim", mixer.state
        elif isinstance(mixer, DeltaNet):
            yield "linear_num_key_heads", mixer.key_heads
            yield "linear_num_value_heads", mixer.value_heads
            yield "linear_key_head_dim", mixer.key
            yield "linear_value_head_dim", mixer.value
