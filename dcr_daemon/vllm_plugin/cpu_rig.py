"""For servers on a CPU only: leave linear weights where the loader put them.

vLLM's CPU backend repacks every unquantised linear weight after loading into an opaque kernel object and frees the
original (and gives `lm_head` a hidden packed copy beside it). Such weights cannot be changed in place. With this
hook a linear layer multiplies with its own parameter through torch instead: the same mathematics at a lower speed,
which is what a test rig on a laptop wants. It is inert on every other platform, where weights stay where they are.
"""

from __future__ import annotations

from typing import Any

from dcr_daemon.vllm_plugin import compat


def install() -> bool:
    """Replace the CPU dispatch. True if this platform is a CPU and the hook is in place; repeatable."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    compat.require(compat.CPU_RIG_NAMES)
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "leaves_unpacked", False):
        return True

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        """What callers look up at call time. Only matrices are ours: a packed convolution is refused at attach."""
        import torch

        if layer.weight.ndim != 2:
            packing(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    dispatch_cpu_unquantized_gemm.leaves_unpacked = True  # type: ignore[attr-defined]  # marks our own stand-in
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    return True
