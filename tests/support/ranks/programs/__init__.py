"""Programs that run as one process per rank: `python -P -m support.ranks.programs.NAME`."""
