"""Which rank this process is among those that publish together (must P1). `Publisher` asks once, when it is made."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from dcr_daemon import runtime
from dcr_daemon.errors import UsageError
from dcr_daemon.projection.agreement.declaration import MAX_WORLD

_ID = re.compile(r"\A[a-z0-9]{1,32}\Z")


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of one start of a process group.

    Attributes:
        group: the value that all ranks of this start agreed on, and that no other start has.
        number: this rank's number; rank 0 is the leader.
        world: the number of ranks.
        nonce: drawn by this process: two processes that believe to be the same rank never share a name.
    """

    group: str = field(default_factory=runtime.nonce)
    number: int = 0
    world: int = 1
    nonce: str = field(default_factory=runtime.nonce)

    @property
    def leads(self) -> bool:
        return self.number == 0

    @property
    def alone(self) -> bool:
        """Whether this is the only process: a group of one."""
        return self.world == 1

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world}"


def find_rank(group: str | None, rank: int | None, world: int | None) -> Rank:
    """This process's rank: as given, else as `torch.distributed` or its launcher says, else alone.

    If `torch.distributed` is initialised and no `group` is given, rank 0 draws one and broadcasts it, and no rank goes
    on before all are here: the one collective call of a publisher's construction. Without it a group needs a launcher's
    run id that is new in each incarnation, or `group`.

    Raises:
        UsageError: numbers that do not go together, or ranks that have nothing to agree on a group by.
    """
    if (rank is None) != (world is None):
        raise UsageError("a rank was given without a world, or a world without a rank", hint="give rank= and world=")
    if group is not None and not _ID.match(group):
        raise UsageError(f"{group!r} is no group id", hint="1 to 32 of a-z and 0-9, new for each start of the group")
    torch_says = distributed()
    if rank is None or world is None:
        rank, world = (torch_says.get_rank(), torch_says.get_world_size()) if torch_says else _of_launcher()
    if not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank} among {world}", hint="ranks count from 0")
    if world > MAX_WORLD:
        raise UsageError(
            f"{world} ranks are more than the {MAX_WORLD} whose parts fit the record of a version",
            hint="let the ranks of one copy of the model publish: give them rank=, world= and group=",
        )
    if group is None and world > 1:
        group = _agreed(torch_says, rank, world) if torch_says else _launched()
    return Rank(group or runtime.nonce(), rank, world)


def distributed() -> Any:
    """`torch.distributed`, if this process has initialised it; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    found = getattr(torch, "distributed", None)
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _agreed(torch_says: Any, rank: int, world: int) -> str:
    if (rank, world) != (torch_says.get_rank(), torch_says.get_world_size()):
        raise UsageError(
            f"rank {rank} of {world} was given, and torch.distributed says {torch_says.get_rank()} of "
            f"{torch_says.get_world_size()}",
            hint="give group= as well: a value that just these ranks agreed on for this start",
        )
    drawn = [runtime.nonce()]
    torch_says.broadcast_object_list(drawn, src=0)
    return drawn[0]


def _of_launcher() -> tuple[int, int]:
    """As torchrun and its like tell each process; alone if nobody does. Processes that a launcher started together and
    that each believed to be alone would fence one another."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)


def _launched() -> str:
    """The launcher's run id and restart count, if its run id is one."""
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if run in ("", "none"):
        raise UsageError(
            "the ranks have nothing to tell this start of the group from an earlier one by",
            hint="initialise torch.distributed before the Publisher, start torchrun with --rdzv-id, or give group=; "
            "one process that publishes alone is rank=0, world=1",
        )
    return hashlib.sha256(f"{run} {restart}".encode()).hexdigest()[:16]
