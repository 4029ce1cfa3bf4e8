"""What the ranks that publish a stream agreed on: `dcr plan` with a stream instead of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcr_daemon.cli.output import print_fields, share, size
from dcr_daemon.errors import Corrupt, KeyNotFound, NotFound

if TYPE_CHECKING:
    from dcr_daemon.ledger.records import Seal
    from dcr_daemon.store.port import Store

_LIMIT = 64 << 20  #: bytes of a verdict


async def read_agreed(store: Store) -> dict[str, Any]:
    """The verdict of the newest process group, as a document.

    Raises:
        NotFound: no group of several ranks has published since the newest claim, or its verdict was collected.
    """
    from dcr_daemon.ledger import names
    from dcr_daemon.ledger.ledger import Ledger
    from dcr_daemon.ledger.objects import Objects
    from dcr_daemon.projection.agreement.gate import decode_verdict

    ledger = Ledger(store)
    state = await ledger.read()
    layout = await Objects(store, floor=lambda: 0).read_layout(ledger.stream)
    seal = await _first_seal(ledger, state.epoch.seq if state.epoch else ledger.tip.seq)
    if seal is None:
        raise NotFound(
            f"nothing was published to {store.url} since its newest claim",
            hint="run this again when a version is published",
        )
    key = names.verdict(seal.version, seal.attempt, names.ROUNDS)
    try:
        verdict = decode_verdict(await store.get(key, limit=_LIMIT))
    except KeyNotFound:
        raise NotFound(
            f"{store.url}: version {seal.version} has no verdict of several ranks",
            hint="one process publishes there, or retention has collected the first version of these ranks",
        ) from None
    except ValueError as error:
        raise Corrupt(f"{store.url}/{key} is no verdict: {error}") from error
    return {
        "stream": store.url,
        "since_version": seal.version,
        "world": len(verdict.nonces),
        "bytes": verdict.direct_bytes + verdict.residual_bytes,
        "direct_bytes": verdict.direct_bytes,
        "residual_bytes": verdict.residual_bytes,
        "regions": verdict.boxes,
        "residual": {
            name: {"why": r.why, "owner": r.owner, "overwrite": r.overwrite, "bytes": layout[layout.index(name)].nbytes}
            for name, r in verdict.residues.items()
        },
    }


async def _first_seal(ledger: Any, first: int) -> Seal | None:
    """The first version that was sealed from record `first` on: its ranks agreed in its attempt."""
    from dcr_daemon.errors import DcrError
    from dcr_daemon.ledger.records import Seal

    for seq in range(first, ledger.tip.seq + 1):
        try:
            record = await ledger.history.record(seq)
        except DcrError:
            continue  # a void record says nothing
        if isinstance(record, Seal):
            return record
    return None


def print_agreed(found: dict[str, Any]) -> None:
    """Print it: the lines of a model's plan that the verdict has."""
    total, residual = found["bytes"], found["residual"]
    print_fields(
        {
            "stream": found["stream"],
            "ranks": f"{found['world']}, since version {found['since_version']}",
            "direct": share(found["direct_bytes"], total),
            "residual": f"{share(found['residual_bytes'], total)}, {len(residual)} tensors" if residual else "none",
            "regions": f"{found['regions']:,}",
        }
        | {name: f"{size(r['bytes'])} by rank {r['owner']}: {r['why']}" for name, r in residual.items()}
    )
