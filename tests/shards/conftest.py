"""Groups of ranks in this room."""

from ranks.scene import ranks, warm_ranks

__all__ = ["ranks", "warm_ranks"]
