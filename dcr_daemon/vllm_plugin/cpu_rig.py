"""For servers on a CPU: keep linear and convolution weights where the loader put them.

Called by `register` in every process of vLLM. vLLM's CPU backend repacks every unquantised linear weight after loading
into an opaque kernel object and frees the original (`lm_head` keeps the original and gets a hidden packed copy), and
the weights of causal convolutions in place. Such weights cannot be changed in place. With this hook a linear layer
multiplies with its own parameter through torch, and the convolution's kernel packs its weight at each call: the same
mathematics at a lower speed, which is enough for tests on a laptop. On other platforms, which do not repack, the hook
does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dcr_daemon.vllm_plugin import compat

#: Kernels of vLLM whose callers say that the convolution's weight was packed at loading.
CONVOLUTIONS = ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu")


def install() -> bool:
    """Replace the CPU dispatch. Returns whether this platform is a CPU, and so the hook is in place; repeatable."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    compat.require(compat.CPU_RIG_NAMES)
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "leaves_unpacked", False):
        return True

    @functools.wraps(packing)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        """Callers look this up at call time."""
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    dispatch_cpu_unquantized_gemm.leaves_unpacked = True  # type: ignore[attr-defined]  # marks our own stand-in
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    for name in CONVOLUTIONS:
        setattr(ops, name, _with_unpacked_weight(getattr(ops, name)))
    return True


def _with_unpacked_weight(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def unpacked(*, weight: Any, is_weight_packed: bool, **more: Any) -> Any:
        """vLLM passes all arguments by name. The parameter has the shape (channels, 1, width) of a linear weight."""
        return kernel(weight=weight.reshape(weight.shape[0], -1), is_weight_packed=False, **more)

    return unpacked
