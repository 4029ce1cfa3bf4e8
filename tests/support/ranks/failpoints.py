"""Every named instant that a rank of a group passes while three versions are made, and how often at the least.

`tests/shards/test_killed_ranks.py` compares this with what ranks write down, and kills one at each.
"""

from __future__ import annotations


def _counted(*texts: str) -> dict[str, int]:
    """`name:3 name …`: an instant, and how many passes of it are certain (one if it does not say)."""
    pairs = [entry.partition(":") for text in texts for entry in text.split()]
    return {name: int(count or 1) for name, _, count in pairs}


#: before a rank has seen the first open of its group: a leftover of then is nobody yet, or a claim like any other
_OPENING = """
publish.base.loaded ledger.layout.created ledger.stream.put ledger.stream.answered publish.created disk.name.write
disk.name.sync disk.name.rename disk.name.synced ledger.epoch.put ledger.epoch.answered ledger.epoch.known
"""
#: what every rank passes in an update
_UPDATE = """
publish.declared:2 disk.baseline.write publish.restore.base
publish.baseline.begun:3 publish.chunk.begun:3 publish.diffed:3 publish.chunk.put:3 publish.chunks.put:3
publish.sums.put:3 publish.part.put:3 publish.uploaded:3 publish.baseline.committed:3
publish.anchor.file:2 publish.anchor.shared:2
"""
_LEADING = """
ledger.open.put:3 ledger.open.answered:3 ledger.open.known:3 publish.open:3 publish.verdict.put:2
publish.joined:3 ledger.seal.put:3 ledger.seal.answered:3 ledger.seal.known:3 publish.sealed:3
publish.anchor.contents:2 publish.anchor.put:2 ledger.anchor.put:2 ledger.anchor.answered:2
ledger.anchor.known:2
"""
_ANSWERING = """
publish.member.open:3 publish.member.fate:3
"""
#: between two updates, or at the end: the baseline's file follows
_BETWEEN = """
disk.hint.write disk.hint.rename
"""
#: the weight of the chain since the newest anchor is remembered
_CHAIN = """
disk.chain.write disk.chain.rename
"""
_MARK = """
disk.mark.write:2 disk.mark.sync:2 disk.mark.rename:2 disk.mark.synced:2
"""
_CLOSING = """
ledger.release.put ledger.release.answered ledger.release.known
"""

#: what is passed besides when a rank in the middle cannot take part in an update
_GIVEN_UP = """
publish.baseline.undone
"""
_ABORTING = """
ledger.abort.put ledger.abort.answered ledger.abort.known retention.deleted
"""
_FAILING = """
publish.failed
"""

LEADER = _counted(_OPENING, _UPDATE, _LEADING, _BETWEEN, _CHAIN, _MARK, _CLOSING)
MEMBER = _counted(_UPDATE, _ANSWERING, _BETWEEN, _MARK)
#: of rank 0, of the rank that fails, and of others
IN_FAILURE = _counted(_GIVEN_UP, _ABORTING), _counted(_FAILING), _counted(_GIVEN_UP)

#: of a sleeper at these instants nothing can be said but that it is in no seal
OUTSIDE = set(_counted(_OPENING, _BETWEEN, _CHAIN, _MARK, _CLOSING))
