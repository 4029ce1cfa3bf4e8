"""Bits of one dtype as bits of another, by the one rule of `projection.values`.

Equal dtypes pass as bits. A wider float is rounded to the canonical one (to nearest even, NaN as torch casts it)
before it is diffed; an exact widening is allowed. torch is imported only when something is really cast.
"""

from __future__ import annotations

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.projection import host
from dcr_daemon.projection.values import torch_dtype


def cast_bits(bits: Bits, given: str, *, canonical: str) -> Bits:
    """Bits of `given` values as bits of as many `canonical` ones; the same array if the dtypes are equal."""
    if given == canonical:
        return bits
    import torch

    return host.host_bits(torch.from_numpy(bits.view("u1")).view(torch_dtype(given)).to(torch_dtype(canonical)))
