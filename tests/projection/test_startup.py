"""From what a trainer hands over to the tensors that are published: live, probes, declaration, verdict, residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.gate import Verdict, declare, judge
from dcr_daemon.projection.live import Live, live
from dcr_daemon.projection.reader import Reader
from dcr_daemon.projection.residual import Exporter, Residual
from dcr_daemon.projection.startup import Current, examine

LAYOUT = Layout(
    [TensorSpec("codes", "F8_E4M3", (6, 4)), TensorSpec("scale", "F32", (1,)), TensorSpec("norm", "BF16", (4,))]
)


class Scaling:
    """torchtitan's interface over an export with one scale for a whole tensor."""

    def to_hf(self, table: dict[str, Any]) -> dict[str, Any]:
        exported = {name: tensor for name, tensor in table.items() if name != "weight"}
        if "weight" in table:
            scale = table["weight"].abs().amax().float() / 448
            exported |= {"codes": (table["weight"] / scale).to(torch.float8_e4m3fn), "scale": scale.reshape(1)}
        return exported


def judged(found: Live, exporter: Exporter) -> Verdict:
    probed = examine(found, LAYOUT, exporter, Reader(found, LAYOUT).read, together=True)
    declaration = declare(
        found.map, LAYOUT, group="g", call=1, attempt=1, rank=0, world=1, nonce="n", export=exporter.kind,
        buildable=exporter.can_build, probed=dict(probed.residual),
        computed=found.conversion.opaque if found.conversion else (), dropped=found.dropped,
    )  # fmt: skip
    return judge([declaration], LAYOUT)


def test_an_export_with_a_shared_scale_is_constructed_from_the_weights_of_the_step() -> None:
    weights = {"weight": torch.randn(6, 4), "norm": torch.randn(4)}
    found = live(weights, LAYOUT, rank=0, world=1, adapter=Scaling())
    current = Current(found)
    exporter = current.exporter(LAYOUT, None)
    verdict = judged(found, exporter)
    assert verdict.overwrites == set(verdict.residual) == {"codes", "scale"}
    assert "residual  77.778%, 2 tensors" in verdict.report(LAYOUT)
    residual = Residual(verdict, LAYOUT, 0, exporter)
    for step in range(2):
        stepped = {name: tensor + step for name, tensor in weights.items()}
        current.live = found.rebind(stepped)
        got = {LAYOUT[index].name: tensor for index, tensor in residual.iterate()}
        made = Scaling().to_hf(stepped)
        assert torch.equal(got["codes"].view(torch.uint8), made["codes"].view(torch.uint8))
        assert torch.equal(got["scale"], made["scale"])


def test_a_users_export_is_asked_for_what_a_rank_reads() -> None:
    """It gives the values of another step: every tensor goes residual, and no probe hides it."""
    weights = {"codes": torch.randn(6, 4).to(torch.float8_e4m3fn), "scale": torch.ones(1), "norm": torch.randn(4)}
    found = live(weights, LAYOUT, rank=0, world=1)
    right = Current(found).exporter(LAYOUT, lambda names: [(name, weights[name]) for name in names])
    assert judged(found, right).residual == {}
    stale = Current(found).exporter(
        LAYOUT, lambda names: [(n, weights[n] * 2 if n == "norm" else weights[n]) for n in names]
    )
    assert judged(found, stale).residual == {
        "norm": "4 of 4 elements that this rank holds are not what the export gives"
    }


def test_a_layer_that_nobody_has_is_refused() -> None:
    found = live({"norm": torch.randn(4)}, LAYOUT, rank=0, world=1)
    exporter = Current(found).exporter(LAYOUT, None)
    with pytest.raises(Incompatible, match=r"2 of 3 tensors .* codes: 24 of 24 elements have no source; scale"):
        judged(found, exporter)
