"""Groups of ranks in this room."""

from support.ranks.group_scenes import ranks, shared_rank_server

__all__ = ["ranks", "shared_rank_server"]
