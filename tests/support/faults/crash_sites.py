"""Every named instant of the daemons, and the scene in which a process can be killed there.

`tests/crash/test_sites.py` compares this list with the source: a failpoint that is not here is one that no test
reaches. A disk door (`disk.<what>.<step>`) has its steps spelt out here one by one, as the ledger's records have.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.faults.crash_scenes import (
    CollectingScene,
    CollectorScene,
    LoadingScene,
    PublisherScene,
    RestoringScene,
    Scene,
    SpoolingScene,
    SubscriberScene,
)


@dataclass(frozen=True)
class Site:
    """`prior`: where an earlier life is killed, so that the next one passes this site. `once`: no life passes it
    twice. `second`: how many instants later the next life is killed too, at most; 0 where none is left to pass."""

    name: str
    scene: type[Scene]
    prior: str = ""
    once: bool = False
    second: int = 12

    @property
    def role(self) -> str:
        return self.scene.role

    @property
    def passes(self) -> tuple[str, ...]:
        return ("first",) if self.once else ("first", "later")

    @property
    def kills(self) -> tuple[str, ...]:
        return ("single", "double") if self.second else ("single",)

    def failpoints(self, when: str) -> list[str]:
        """What the lives are armed with, up to and with the one that dies here."""
        return [*filter(None, [self.prior]), self.name if when == "first" else f"{self.name}:2"]


def _sites(scene: type[Scene], names: str, *, prior: str = "", once: bool = False, second: int = 12) -> list[Site]:
    return [Site(name, scene, prior, once, second) for name in names.split()]


SITES = [
    # A publisher: the stream is made, claimed, its baseline loaded.
    *_sites(
        PublisherScene,
        "disk.baseline.write publish.base.loaded ledger.layout.created ledger.stream.put ledger.stream.answered "
        "publish.created disk.name.write disk.name.sync disk.name.rename disk.name.synced ledger.epoch.put "
        "ledger.epoch.answered ledger.epoch.known publish.restored disk.published.write disk.published.rename",
        once=True,
    ),
    *_sites(PublisherScene, "publish.restore.cached", prior="publish.remembered", once=True),
    *_sites(PublisherScene, "publish.restore.base", prior="publish.shard.taken", once=True),
    *_sites(RestoringScene, "publish.restore.anchor publish.restore.version", once=True),
    # What it remembers of the ledger and of its baseline.
    *_sites(
        PublisherScene,
        "disk.mark.write disk.mark.sync disk.mark.rename disk.mark.synced disk.hint.write disk.hint.rename "
        "disk.chain.write disk.chain.rename",
    ),
    # An attempt: opened, diffed, uploaded, sealed.
    *_sites(
        PublisherScene,
        "ledger.open.put ledger.open.answered ledger.open.known publish.open publish.baseline.begun "
        "publish.shard.taken publish.diffed publish.chunk.begun publish.chunk.put publish.chunks.put "
        "publish.sums.put publish.part.put publish.uploaded ledger.seal.put ledger.seal.answered ledger.seal.known "
        "publish.sealed publish.baseline.committed publish.remembered",
    ),
    *_sites(SpoolingScene, "disk.spool.write publish.chunk.begun publish.chunk.put"),
    # An attempt that comes to nothing.
    *_sites(PublisherScene, "ledger.abort.put ledger.abort.answered ledger.abort.known publish.baseline.undone"),
    # An anchor, what goes by it, and the end.
    *_sites(
        PublisherScene,
        "publish.anchor.proved publish.anchor.file publish.anchor.contents publish.anchor.put ledger.anchor.put "
        "ledger.anchor.answered ledger.anchor.known",
    ),
    *_sites(
        CollectingScene,
        "retention.planned ledger.floor.put ledger.floor.answered ledger.floor.known retention.floor retention.deleted",
    ),
    *_sites(PublisherScene, "ledger.release.put ledger.release.answered ledger.release.known", once=True),
    # The same from outside.
    *_sites(
        CollectorScene,
        "ledger.epoch.put ledger.epoch.answered ledger.epoch.known retention.claimed retention.planned "
        "ledger.floor.put ledger.floor.answered ledger.floor.known retention.floor ledger.release.put "
        "ledger.release.answered ledger.release.known",
        once=True,
        second=1,
    ),
    *_sites(CollectorScene, "retention.deleted", once=True, second=0),
    # A stream in a directory.
    *_sites(
        PublisherScene,
        "disk.object.write disk.object.sync disk.object.synced store.file.written store.file.linked",
    ),
    # A subscriber: attached, located, proved.
    *_sites(SubscriberScene, "subscribe.found engine.dir.claimed subscribe.attached", once=True),
    *_sites(SubscriberScene, "subscribe.located subscribe.proved subscribe.serving", once=True),
    *_sites(SubscriberScene, "disk.mark.write disk.mark.sync disk.mark.rename disk.mark.synced"),
    # A version on its way into the directory.
    *_sites(
        SubscriberScene,
        "subscribe.prefetch.fetched subscribe.prefetch.kept subscribe.chunk.kept disk.staged.write disk.staged.rename "
        "subscribe.staged disk.journal.write disk.journal.sync engine.dir.prepared subscribe.prepared "
        "engine.dir.journal disk.engine.write disk.engine.sync disk.engine.rename disk.engine.synced engine.dir.dirty "
        "engine.dir.hidden engine.dir.write disk.tensors.sync engine.dir.data engine.dir.version engine.dir.shown "
        "engine.dir.clean subscribe.swapped subscribe.served subscribe.stage.dropped subscribe.tidied "
        "subscribe.status.put subscribe.status.told",
    ),
    # A whole one.
    *_sites(LoadingScene, "subscribe.anchor.file disk.tensors.write engine.dir.move"),
    *_sites(
        LoadingScene,
        "subscribe.anchor.fetched disk.checkpoint.sync disk.checkpoint.synced engine.dir.incoming subscribe.loaded "
        "subscribe.anchor.forgotten engine.dir.journal engine.dir.dirty engine.dir.data engine.dir.version",
        once=True,
    ),
]

_OF_GROUPS = """
publish.declared publish.verdict.put publish.joined publish.anchor.shared publish.member.open publish.member.fate
publish.failed
"""

_OF_LINKS = "disk.shards.write disk.shards.sync engine.dir.copied engine.dir.owned disk.shards.synced"

#: named instants that no scene passes, and the tests of what does: an engine that is not a directory, a directory of
#: links, ranks of a group
ELSEWHERE = {
    "subscribe.loaded.kept": "tests/subscribe/test_loaded.py",
    **dict.fromkeys(_OF_LINKS.split(), "tests/crash/test_directory_engine.py"),
    **dict.fromkeys(_OF_GROUPS.split(), "tests/shards/test_killed_ranks.py"),
}

#: what only a stream in a directory passes
IN_A_DIRECTORY = {site.name for site in SITES if site.name.startswith(("store.file.", "disk.object."))}
