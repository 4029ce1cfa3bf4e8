"""`RankResources`: what one rank takes when it opens a stream, and gives back at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dcr_daemon.events import Emit
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.options import PublishOptions, stream_state
from dcr_daemon.publish.rank import Rank
from dcr_daemon.publish.state import StateDirectory
from dcr_daemon.runtime import Workers
from dcr_daemon.store.port import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """Made by `take`, given back by `close`.

    Attributes:
        store: where the stream is; closed by whoever opened it.
        state: this rank's state directory, locked.
        workers: threads for byte work.
        ledger: of the stream; `take` neither reads nor claims it.
    """

    options: PublishOptions
    rank: Rank
    store: Store
    emit: Emit
    state: StateDirectory
    workers: Workers
    ledger: Ledger

    @classmethod
    def take(cls, options: PublishOptions, store: Store, *, emit: Emit, rank: Rank) -> Self:
        """Lock the state directory, start the workers, and make a ledger for `store`.

        Raises:
            UsageError, ResourceExhausted: see `StateDirectory`.
        """
        path = stream_state(options.state, store.url)
        # Rank 0's does not move when the number of ranks grows: the publisher's name is kept there.
        state = StateDirectory(path if rank.leads else path / f"rank-{rank.number}")
        return cls(
            options=options, rank=rank, store=store, emit=emit, state=state, workers=Workers(options.workers),
            ledger=Ledger(store, mark=state.mark, emit=emit),
        )  # fmt: skip

    def close(self) -> None:
        self.state.close()
        self.workers.close()
