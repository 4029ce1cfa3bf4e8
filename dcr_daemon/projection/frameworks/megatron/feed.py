"""Megatron's feed-forward blocks: dense, and mixtures of experts with shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.projection.frameworks.megatron.parameter import Parameter, Site, Target
from dcr_daemon.projection.frameworks.megatron.splits import (
    Columns,
    InterleavedExpert,
    Joined,
    Replicated,
    Rows,
    Section,
    Split,
    TransposedExpert,
)
from dcr_daemon.projection.frameworks.models.architecture import Experts, Feed, Mlp, Names


def feed(site: Site, feed: Feed, hidden: int, names: Names) -> Iterator[Parameter]:
    """Parameters of a layer's feed-forward block and of the norm before it."""
    dense = isinstance(feed, Mlp)
    norm = "mlp.linear_fc1.layer_norm_weight pre_mlp_layernorm.weight" if dense else "pre_mlp_layernorm.weight"
    yield site.parameter(norm, "norm", Replicated((hidden,)), (names.feed_norm, (hidden,)))
    if isinstance(feed, Mlp):
        yield from _mlp(site, "mlp.", kind="mlp", at=names.feed, mlp=feed, hidden=hidden, names=names)
    else:
        yield from _router(site, feed, hidden=hidden, names=names)
        yield from (
            _stacked(site, feed, hidden=hidden, names=names)
            if feed.stacked
            else _experts(site, feed, hidden=hidden, names=names)
        )
        if feed.shared:
            shared = Mlp(feed.shared, gated=feed.gated)
            yield from _mlp(
                site,
                "mlp.shared_experts.",
                kind="shared expert",
                at=names.shared,
                mlp=shared,
                hidden=hidden,
                names=names,
            )


def _gated(width: int, hidden: int) -> Split:
    return Joined((Section(0, 0, width), Section(1, 0, width)), (hidden,))


def _mlp(site: Site, local: str, *, kind: str, at: str, mlp: Mlp, hidden: int, names: Names) -> Iterator[Parameter]:
    inward, outward = (mlp.width, hidden), (hidden, mlp.width)
    into = [names.gate, names.up] if mlp.gated else [names.up]
    yield site.parameter(
        f"{local}linear_fc1.weight",
        kind,
        _gated(mlp.width, hidden) if mlp.gated else Rows(inward),
        *((f"{at}{name}.weight", inward) for name in into),
    )
    yield site.parameter(f"{local}linear_fc2.weight", kind, Columns(outward), (f"{at}{names.down}.weight", outward))
    if mlp.bias:
        sections = tuple(Section(i, 0, mlp.width) for i in range(len(into)))
        yield site.parameter(
            f"{local}linear_fc1.bias",
            kind,
            Joined(sections, ()),
            *((f"{at}{name}.bias", (mlp.width,)) for name in into),
        )
        yield site.parameter(
            f"{local}linear_fc2.bias", kind, Replicated((hidden,)), (f"{at}{names.down}.bias", (hidden,))
        )


def _router(site: Site, experts: Experts, *, hidden: int, names: Names) -> Iterator[Parameter]:
    rows = (experts.count, hidden)
    yield site.parameter("mlp.router.weight", "router", Replicated(rows), (f"{names.router}.weight", rows))
    for wanted, local, name, dtype in (
        (experts.router_bias, "mlp.router.bias", "bias", ""),
        (experts.correction, "mlp.router.expert_bias", "e_score_correction_bias", "F32"),
    ):
        if wanted:
            one = (experts.count,)
            yield site.parameter(local, "router", Replicated(one), (f"{names.router}.{name}", one), dtype=dtype)
    if experts.shared_gate:
        one_row = (1, hidden)
        yield site.parameter(
            "mlp.shared_experts.gate_weight", "router", Replicated(one_row), ("mlp.shared_expert_gate.weight", one_row)
        )
    if experts.latent:
        for name, shape in (("fc1", (experts.latent, hidden)), ("fc2", (hidden, experts.latent))):
            proj = f"{name}_latent_proj.weight"
            yield site.parameter(f"mlp.{proj}", "latent projection", Replicated(shape), (f"{names.feed}{proj}", shape))


def _local(site: Site, tensor: str, what: str = "weight") -> tuple[str, ...]:
    """One expert's parameter as Transformer Engine's grouped linear calls it, and as a sequence of experts does."""
    return site.names(f"mlp.experts.{tensor}.{what}{{expert}} mlp.experts.local_experts.{{expert}}.{tensor}.{what}")


def _experts(site: Site, experts: Experts, *, hidden: int, names: Names) -> Iterator[Parameter]:
    hidden = experts.latent or hidden
    inward, outward = (experts.width, hidden), (hidden, experts.width)
    fc1: Split = _gated(experts.width, hidden) if experts.gated else Rows(inward)
    into = [names.gate, names.up] if experts.gated else [names.up]
    halves = (_local(site, "linear_fc1"), fc1, into, inward), (
        _local(site, "linear_fc2"), Columns(outward), [names.down], outward
    )  # fmt: skip
    for expert in range(experts.count):
        at = f"{site.canonical}{names.experts}{expert}."
        for local, split, tensors, shape in halves:
            targets = tuple(Target(TensorSpec(f"{at}{name}.weight", site.dtype, shape)) for name in tensors)
            yield Parameter(local, "experts", site.place, split, targets, expert)


def _stacked(site: Site, experts: Experts, *, hidden: int, names: Names) -> Iterator[Parameter]:
    count, width = experts.count, experts.width
    at = site.canonical + names.experts
    tables: tuple[tuple[tuple[str, ...], Split, TensorSpec], ...] = (
        (
            _local(site, "linear_fc1"),
            InterleavedExpert(width, hidden),
            TensorSpec(f"{at}gate_up_proj", site.dtype, (count, hidden, 2 * width)),
        ),
        (
            _local(site, "linear_fc1", "bias"),
            InterleavedExpert(width, 1, bias=True),
            TensorSpec(f"{at}gate_up_proj_bias", site.dtype, (count, 2 * width)),
        ),
        (
            _local(site, "linear_fc2"),
            TransposedExpert(width, hidden),
            TensorSpec(f"{at}down_proj", site.dtype, (count, width, hidden)),
        ),
        (
            _local(site, "linear_fc2", "bias"),
            Replicated((hidden,)),
            TensorSpec(f"{at}down_proj_bias", site.dtype, (count, hidden)),
        ),
    )
    for expert in range(count):
        for local, split, spec in tables:
            target = Target(spec, expert * (spec.elements // count))
            yield Parameter(local, "experts", site.place, split, (target,), expert)
