"""For servers on a CPU: keep linear weights where the loader put them.

Called by `register` in every process of vLLM. vLLM's CPU backend repacks every unquantised linear weight after loading
into an opaque kernel object and frees the original (`lm_head` keeps the original and gets a hidden packed copy). Such
weights cannot be changed in place. With this hook a linear layer multiplies with its own parameter through torch: the
same mathematics at a lower speed, which is enough for tests on a laptop. On other platforms, which do not repack, the
hook does nothing.
"""

from __future__ import annotations

from typing import Any

from dcr_daemon.vllm_plugin import compat


def install() -> bool:
    """Replace the CPU dispatch. Returns whether this platform is a CPU, and so the hook is in place; repeatable."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    compat.require(compat.CPU_RIG_NAMES)
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "leaves_unpacked", False):
        return True

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        """Callers look this up at call time. Only matrices stay unpacked: a packed convolution is refused at attach."""
        import torch

        if layer.weight.ndim != 2:
            packing(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    dispatch_cpu_unquantized_gemm.leaves_unpacked = True  # type: ignore[attr-defined]  # marks our own stand-in
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    return True
