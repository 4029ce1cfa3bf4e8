"""Objects that a ledger does not explain: evidence that it has lost records, never rubbish (must L5).

An `open` is durable before the first object of its attempt, and an anchor is named after a record. So a listing that is
older than the tip shows nothing of a later record, nothing of a version that could not be opened, no attempt without
its `open`, and none that later records seal although it does not count. Such objects are of a history that the ledger
does not tell, or tells no more.
"""

from __future__ import annotations

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger.fold import Tip, fold, tip_before
from dcr_daemon.ledger.holes import missing_records
from dcr_daemon.ledger.records import Seal
from dcr_daemon.ledger.retention.plan import Plan
from dcr_daemon.ledger.slot import read_slot
from dcr_daemon.store.port import Store


async def is_unexplained(store: Store, tip: Tip, *, version: int, attempt: int) -> bool:
    """Whether no `open` of this attempt is in the ledger, or later records seal it, by what they claim themselves.

    Asked about an attempt that is not sealed by the history up to `tip`: then another history was in the ledger, or is.
    """
    before: Tip | None = None
    for seq in range(attempt, tip.seq + 1):
        body = await read_slot(store, seq)
        if body is None:
            raise missing_records(store.url, [seq])
        before = before or tip_before(tip.stream, seq, body=body)
        if before is None:
            return True
        step = fold(before, body)
        if isinstance(step.record, Seal) and (step.record.version, step.record.attempt) == (version, attempt):
            return True
        before = step.tip
        if before.state.open is None or before.state.open.seq != attempt:
            return seq == attempt
    return False


def check_explained(plan: Plan, url: str) -> None:
    """Raise `Corrupt` if the plan names objects that the ledger of `url` does not explain."""
    if plan.unexplained:
        more = f", and {len(plan.unexplained) - 1} objects more" if len(plan.unexplained) > 1 else ""
        raise Corrupt(
            f"the ledger of {url} is damaged: it does not know of {plan.unexplained[0]}{more}",
            hint="records are missing, or two histories are in it; nothing is deleted: `dcr verify` says what to do",
        )
