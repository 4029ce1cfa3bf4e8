"""Megatron's attention and sequence mixers: query groups, latent attention, Mamba2, gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator

from dcr_daemon.projection.frameworks.megatron.parameter import Parameter, Site
from dcr_daemon.projection.frameworks.megatron.splits import Columns, Joined, QueryGroups, Replicated, Rows, Section
from dcr_daemon.projection.frameworks.models.architecture import Attention, DeltaNet, Latent, Mamba, Mixer, Names


def mixer(site: Site, mixer: Mixer, hidden: int, names: Names) -> Iterator[Parameter]:
    """Parameters of a layer's mixer and of the norm before it."""
    if isinstance(mixer, Attention):
        yield from _norm(
            site, hidden, names=names, local="self_attention.linear_qkv.layer_norm_weight input_layernorm.weight"
        )
        yield from _query_groups(site, mixer, hidden=hidden, at=names.mixer)
    elif isinstance(mixer, Latent):
        yield from _norm(site, hidden, names=names, local="input_layernorm.weight")
        yield from _latent(site, mixer, hidden=hidden, at=names.mixer)
    elif isinstance(mixer, Mamba):
        yield from _norm(site, hidden, names=names, local="mixer.in_proj.layer_norm_weight norm.weight")
        yield from _mamba(site, mixer, hidden=hidden, at=names.mixer)
    else:
        yield from _norm(
            site, hidden, names=names, local="self_attention.in_proj.layer_norm_weight input_layernorm.weight"
        )
        yield from _delta_net(site, mixer, hidden)


def _norm(site: Site, hidden: int, *, names: Names, local: str) -> Iterator[Parameter]:
    yield site.parameter(local, "norm", Replicated((hidden,)), (names.mixer_norm, (hidden,)))


def _query_groups(site: Site, attention: Attention, *, hidden: int, at: str) -> Iterator[Parameter]:
    heads, groups, head, gate = attention.heads, attention.groups, attention.head, attention.gate
    rows = {"q": heads * head * (1 + gate), "k": groups * head, "v": groups * head}
    yield site.parameter(
        "self_attention.linear_qkv.weight",
        "attention q, k, v",
        QueryGroups(heads, groups, head, hidden, gate),
        *((f"{at}{letter}_proj.weight", (count, hidden)) for letter, count in rows.items()),
    )
    if attention.bias:
        yield site.parameter(
            "self_attention.linear_qkv.bias",
            "attention q, k, v",
            QueryGroups(heads, groups, head, 1, gate, bias=True),
            *((f"{at}{letter}_proj.bias", (count,)) for letter, count in rows.items()),
        )
    out = (hidden, heads * head)
    yield site.parameter(
        "self_attention.linear_proj.weight", "attention output", Columns(out), (f"{at}o_proj.weight", out)
    )
    if attention.out_bias:
        yield site.parameter(
            "self_attention.linear_proj.bias",
            "attention output",
            Replicated((hidden,)),
            (f"{at}o_proj.bias", (hidden,)),
        )
    if attention.norms:
        for letter in "qk":
            yield site.parameter(
                f"self_attention.{letter}_layernorm.weight",
                "norm",
                Replicated((head,)),
                (f"{at}{letter}_norm.weight", (head,)),
            )
    if attention.sinks:
        yield site.parameter(
            "self_attention.core_attention.softmax_offset", "attention sinks", Rows((heads,)), (f"{at}sinks", (heads,))
        )


def _latent(site: Site, latent: Latent, *, hidden: int, at: str) -> Iterator[Parameter]:
    """Projections down are whole on every rank (Transformer Engine's "duplicated"); `live` sees where they are not."""
    query = (latent.heads * (latent.nope + latent.rope), latent.q_rank or hidden)
    kind = "latent attention"
    if latent.q_rank is None:
        yield site.parameter("self_attention.linear_q_proj.weight", kind, Rows(query), (f"{at}q_proj.weight", query))
    else:
        down = (latent.q_rank, hidden)
        yield site.parameter(
            "self_attention.linear_q_down_proj.weight", kind, Replicated(down), (f"{at}q_a_proj.weight", down)
        )
        yield site.parameter(
            "self_attention.linear_q_up_proj.layer_norm_weight self_attention.q_layernorm.weight",
            "norm",
            Replicated((latent.q_rank,)),
            (f"{at}q_a_layernorm.weight", (latent.q_rank,)),
        )
        yield site.parameter(
            "self_attention.linear_q_up_proj.weight", kind, Rows(query), (f"{at}q_b_proj.weight", query)
        )
    down, up = (latent.kv_rank + latent.rope, hidden), (latent.heads * (latent.nope + latent.value), latent.kv_rank)
    yield site.parameter(
        "self_attention.linear_kv_down_proj.weight", kind, Replicated(down), (f"{at}kv_a_proj_with_mqa.weight", down)
    )
    yield site.parameter(
        "self_attention.linear_kv_up_proj.layer_norm_weight self_attention.kv_layernorm.weight",
        "norm",
        Replicated((latent.kv_rank,)),
        (f"{at}kv_a_layernorm.weight", (latent.kv_rank,)),
    )
    yield site.parameter("self_attention.linear_kv_up_proj.weight", kind, Rows(up), (f"{at}kv_b_proj.weight", up))
    out = (hidden, latent.heads * latent.value)
    yield site.parameter("self_attention.linear_proj.weight", kind, Columns(out), (f"{at}o_proj.weight", out))


def _mamba(site: Site, mamba: Mamba, *, hidden: int, at: str) -> Iterator[Parameter]:
    inner, states, heads = mamba.inner, mamba.state_rows, mamba.heads
    conv = inner + 2 * states
    x, b, c = Section(0, 0, inner), Section(0, inner, states), Section(0, inner + states, states)
    z, after = Section(0, 0, inner), [Section(0, inner + s.first, s.blocks) for s in (x, b, c)]
    projected = (z, *after, Section(0, inner + conv, heads))
    rows = (inner + conv + heads, hidden)
    yield site.parameter(
        "mixer.in_proj.weight", "mamba input", Joined(projected, (hidden,)), (f"{at}in_proj.weight", rows)
    )
    yield site.parameter(
        "mixer.conv1d.weight mixer.conv1d_weight",
        "mamba convolution",
        Joined((x, b, c), (1, mamba.kernel)),
        (f"{at}conv1d.weight", (conv, 1, mamba.kernel)),
    )
    if mamba.conv_bias:
        yield site.parameter(
            "mixer.conv1d.bias mixer.conv1d_bias",
            "mamba convolution",
            Joined((x, b, c), ()),
            (f"{at}conv1d.bias", (conv,)),
        )
    for name in ("A_log", "D", "dt_bias"):
        yield site.parameter(f"mixer.{name}", "mamba state", Rows((heads,)), (f"{at}{name}", (heads,)))
    yield site.parameter("mixer.norm.weight", "norm", Rows((inner,)), (f"{at}norm.weight", (inner,)))
    out = (hidden, inner)
    yield site.parameter("mixer.out_proj.weight", "mamba output", Columns(out), (f"{at}out_proj.weight", out))


def _delta_net(site: Site, net: DeltaNet, hidden: int) -> Iterator[Parameter]:
    """A rank's rows are [q | k | v | z | b | a]; the checkpoint has q, k, v, z of one key head after the other, and so
    b, a. The output norm is zero-centred in Megatron, and is not in the checkpoint."""
    at, kind = "linear_attn.", "delta net"
    each = net.value_heads // net.key_heads
    values = each * net.value
    apart = 2 * net.key + 2 * values
    starts = ((0, net.key), (net.key, net.key), (2 * net.key, values), (2 * net.key + values, values))
    big = [Section(0, first, net.key_heads, rows, apart) for first, rows in starts]
    small = [Section(1, first, net.key_heads, each, 2 * each) for first in (0, each)]
    yield site.parameter(
        "self_attention.in_proj.weight",
        "delta net input",
        Joined((*big, *small), (hidden,)),
        (f"{at}in_proj_qkvz.weight", (net.key_heads * apart, hidden)),
        (f"{at}in_proj_ba.weight", (2 * net.value_heads, hidden)),
    )
    keys, inner = net.key_heads * net.key, net.value_heads * net.value
    conv = (Section(0, 0, keys), Section(0, keys, keys), Section(0, 2 * keys, inner))
    yield site.parameter(
        "self_attention.conv1d.weight",
        "delta net convolution",
        Joined(conv, (1, net.kernel)),
        (f"{at}conv1d.weight", (2 * keys + inner, 1, net.kernel)),
    )
    for name in ("dt_bias", "A_log"):
        yield site.parameter(
            f"self_attention.{name}", kind, Rows((net.value_heads,)), (f"{at}{name}", (net.value_heads,))
        )
    yield site.parameter(
        "self_attention.out_norm.weight", "norm", Replicated((net.value,)), (f"{at}norm.weight", (net.value,)), add=1.0
    )
    out = (hidden, inner)
    yield site.parameter("self_attention.out_proj.weight", kind, Columns(out), (f"{at}out_proj.weight", out))
