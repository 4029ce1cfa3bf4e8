"""Groups of ranks in this room."""

from support.ranks.group_scenes import ranks, warm_ranks

__all__ = ["ranks", "warm_ranks"]
