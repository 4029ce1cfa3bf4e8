"""DCR, delta-compressed refit: moves RL policies from trainers to vLLM fleets through a bucket, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcr_daemon.errors import DcrError

if TYPE_CHECKING:
    from dcr_daemon.publish.publisher import Publisher, Trainer, Update

__version__ = "0.1.0"
__all__ = ["DcrError", "Publisher", "Trainer", "Update", "__version__"]


def __getattr__(name: str) -> Any:
    """`Publisher` on first use, so that `import dcr_daemon` loads neither torch nor numba."""
    if name in ("Publisher", "Trainer", "Update"):
        from dcr_daemon.publish import publisher

        return getattr(publisher, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
