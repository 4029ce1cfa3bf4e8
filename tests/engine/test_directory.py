from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.measure.running_tasks import running_tasks

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import BATCH_BLOCKS
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.pieces import piece_metadata, plan_files
from dcr_daemon.checkpoint.safetensors import SafetensorsFile, write_safetensors
from dcr_daemon.engine import open_engine
from dcr_daemon.engine.directory.checkout import Checkout
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import Transaction, Verdict
from dcr_daemon.errors import Corrupt, CorruptChunk, EngineRefused, Fenced, ResourceExhausted, UsageError


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "current"


async def proved(versions, here, version=0, **options) -> DirectoryEngine:
    """An engine over a fresh directory at `version`."""
    if not here.exists():
        versions.save(here, version, shard_bytes=20_000)
    engine = DirectoryEngine(here, **options)
    await engine.attach(versions.facts())
    await engine.prove(version, versions.vector_file(version), f"v{version}")
    return engine


async def test_a_plain_checkpoint_of_the_stream_is_adopted(make_versions, here):
    versions = make_versions(1)
    versions.save(here, 1)
    engine = DirectoryEngine(here)
    attached = await engine.attach(versions.facts())
    assert attached.version is None
    assert np.array_equal(np.frombuffer(attached.vector, "<u8"), versions.vector(1))
    await engine.prove(1, versions.vector_file(1), "v1")
    await engine.close()
    again = DirectoryEngine(here)
    assert (await again.attach(versions.facts())).version == 1
    await again.close()


async def test_several_hops_become_one_change_with_every_sum_checked(make_versions, here):
    versions = make_versions(3, rate=0.3)
    engine = await proved(versions, here)
    prepared = await engine.prepare(versions.transaction(1, 2, 3))
    assert prepared.fits == 3
    changed = sum(int((versions.values[0][n] != versions.values[3][n]).sum()) for n in versions.values[0])
    assert prepared.changed >= changed
    assert versions.version_of(here) == 0
    swapped = await engine.swap("to-3")
    assert (swapped.verdict, swapped.version, swapped.tries) == (Verdict.COMMITTED, 3, 1)
    assert versions.version_of(here) == 3
    await engine.close()


async def test_nothing_compiles_once_attached(make_versions, here):
    """A compile takes seconds, in which an update waits, or no loader may open the directory."""
    from dcr_daemon.canonical import kernels as sums
    from dcr_daemon.checkpoint import kernels as of_files
    from dcr_daemon.codec import kernels as codec
    from dcr_daemon.codec.warm import _compile
    from dcr_daemon.engine import kernels

    versions = make_versions(3, rate=0.3)
    txn = versions.transaction(1, 2, 3)
    used = [of_files.patch, of_files.holds, kernels.match, codec.unpack_gaps, codec.unpack_bitmask, codec.unpack_steps,
            sums.sum_at]  # fmt: skip
    for kernel in used:
        kernel._reset_overloads()  # what other tests have compiled
    _compile.cache_clear()
    engine = await proved(versions, here)
    compiled = [len(kernel.signatures) for kernel in used]
    assert all(compiled)
    await engine.prepare(txn)
    assert (await engine.swap("to-3")).version == 3
    assert [len(kernel.signatures) for kernel in used] == compiled
    await engine.close()


async def test_a_dense_change_and_one_of_nothing_are_versions_too(make_versions, here):
    versions = make_versions(1, rate=1.0)
    versions.put(versions.values[1])
    engine = await proved(versions, here)
    for version in (1, 2):
        await engine.prepare(versions.transaction(version))
        assert (await engine.swap(f"to-{version}")).version == version
    assert versions.encode(2) == []
    assert (await engine.status()).version == 2
    await engine.close()


async def test_hops_over_the_budget_are_left_for_the_next_transaction(make_versions, here):
    versions = make_versions(3)
    engine = await proved(versions, here, budget=1)
    assert (await engine.prepare(versions.transaction(1, 2, 3))).fits == 1
    assert (await engine.swap("to-3")).version == 1
    assert versions.version_of(here) == 1
    await engine.close()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda data: data[:-20], CorruptChunk),
        (
            lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
            CorruptChunk,
        ),
        (lambda data: b"", CorruptChunk),
    ],
)
async def test_a_spoiled_chunk_is_refused_before_anything_is_written(make_versions, here, spoil, error):
    versions = make_versions(1)
    engine = await proved(versions, here)
    txn = versions.transaction(1)
    versions.hop(1, edit=spoil)
    with pytest.raises(error):
        await engine.prepare(txn)
    assert versions.version_of(here) == 0
    assert not Checkout(here).dirty()
    await engine.prepare(versions.transaction(1))
    assert (await engine.swap("to-1")).version == 1
    await engine.close()


async def test_a_missing_or_foreign_chunk_is_refused_by_name(make_versions, here):
    versions, other = make_versions(1), make_versions(1, seed=5)
    engine = await proved(versions, here)
    hop = versions.hop(1)
    short = msgspec.structs.replace(hop, chunks=hop.chunks[1:])
    with pytest.raises(EngineRefused, match="do not lead from its base to its seal"):
        await engine.prepare(Transaction(id="short", hops=[short], label="v1"))
    other.stream = "beef" * 8
    strange = msgspec.structs.replace(hop, chunks=other.hop(1).chunks)
    with pytest.raises(CorruptChunk, match=r"of stream beef.*expected version 1"):
        await engine.prepare(Transaction(id="strange", hops=[strange], label="v1"))
    assert versions.version_of(here) == 0
    await engine.close()


async def test_a_change_that_begins_elsewhere_is_refused(make_versions, here):
    versions = make_versions(2)
    engine = await proved(versions, here)
    with pytest.raises(EngineRefused, match="begins at 1"):
        await engine.prepare(versions.transaction(2))
    with pytest.raises(EngineRefused, match="differ"):
        await engine.prove(1, versions.vector_file(1), "v1")
    await engine.close()


async def test_weights_changed_by_somebody_else_leave_the_engine_unproved(make_versions, here):
    versions = make_versions(1)
    engine = await proved(versions, here)
    await engine.prepare(versions.transaction(1))
    shard = sorted(here.glob("*.safetensors"))[0]
    with SafetensorsFile(shard, writable=True) as file:
        name = file.specs[0].name
        file.write_elements(name, np.array([0]), values=file.bits(name)[:1] ^ 1)
        file.sync()
    shard.touch()
    with pytest.raises(EngineRefused, match="changed by somebody else"):
        await engine.swap("to-1")
    assert (await engine.status()).version is None
    attached = await engine.attach(versions.facts())
    assert attached.version is None
    await engine.close()


async def test_an_anchor_fills_an_empty_directory_and_replaces_a_torn_one(make_versions, here, tmp_path):
    versions = make_versions(2)
    anchor = versions.save(tmp_path / "anchor", 2, shard_bytes=30_000)
    files = [str(path) for path in sorted(anchor.glob("*.safetensors"))]
    engine = DirectoryEngine(here)
    assert (await engine.attach(versions.facts())).version is None
    with pytest.raises(EngineRefused, match="no whole checkpoint"):
        await engine.prove(0, versions.vector_file(0), "v0")
    loaded = await engine.load(2, files, versions.vector_file(2), "v2")
    assert (loaded.verdict, loaded.version) == (Verdict.COMMITTED, 2)
    assert versions.version_of(here) == 2
    assert json.loads((here / "config.json").read_bytes()) == {"model_type": "toy"}
    assert (here / "tokenizer.json").exists()
    await engine.close()
    next(iter(here.glob("*.safetensors"))).write_bytes(b"torn")
    engine = DirectoryEngine(here, shard_bytes=20_000)
    assert (await engine.attach(versions.facts())).version is None
    await engine.load(2, files, versions.vector_file(2), "v2")
    assert versions.version_of(here) == 2
    assert not list((here / ".dcr").glob("incoming*"))
    await engine.close()


async def test_an_anchor_cut_into_pieces_becomes_whole_tensors(make_versions, here, tmp_path):
    versions = make_versions()
    layout, files = versions.layout, []
    for n, pieces in enumerate(plan_files(layout, 9_000)):
        path = tmp_path / f"anchor-{n}.safetensors"
        items = [(p.entry, versions.values[0][layout[p.tensor].name][p.run]) for p in pieces]
        write_safetensors(path, items, metadata=piece_metadata(layout, pieces))
        files.append(str(path))
    engine = DirectoryEngine(here)
    await engine.attach(versions.facts())
    await engine.load(0, files, versions.vector_file(0), "v0")
    assert versions.version_of(here) == 0
    with pytest.raises(EngineRefused, match="do not hold all of"):
        await engine.load(0, files[:-1], versions.vector_file(0), "v0")
    assert versions.version_of(here) == 0
    await engine.close()


async def test_files_of_another_version_are_not_loaded(make_versions, here, tmp_path):
    versions = make_versions(1)
    engine = await proved(versions, here)
    wrong = versions.save(tmp_path / "wrong", 1)
    with pytest.raises(EngineRefused, match=r"are not that version: .*embed"):
        await engine.load(0, [str(wrong / "model.safetensors")], versions.vector_file(0), "v0")
    assert versions.version_of(here) == 0
    assert (await engine.status()).version == 0
    await engine.close()


async def test_a_strange_directory_is_refused_and_left_as_it_is(make_versions, here, tmp_path):
    versions, other = make_versions(), make_versions(seed=9)
    here.mkdir()
    (here / "notes.txt").write_text("mine")
    engine = DirectoryEngine(here)
    with pytest.raises(EngineRefused, match="neither empty nor a checkpoint"):
        await engine.attach(versions.facts())
    await engine.close()
    assert [path.name for path in here.iterdir()] == ["notes.txt"]
    foreign = other.save(tmp_path / "foreign")
    engine = DirectoryEngine(foreign)
    await engine.attach(versions.facts())
    anchor = versions.save(tmp_path / "anchor")
    with pytest.raises(EngineRefused, match="would be overwritten"):
        await engine.load(0, [str(anchor / "model.safetensors")], versions.vector_file(0), "v0")
    await engine.close()
    assert other.version_of(foreign) == 0
    assert not (foreign / ".dcr").exists()


async def test_other_tensors_are_named(make_versions, here):
    versions = make_versions()
    layout = Layout([TensorSpec("embed.weight", "F16", (257, 64)), TensorSpec("odd", "BF16", (2,))])
    write_checkpoint(
        here, layout, bits_of=lambda name: np.zeros(layout[layout.index(name)].elements, "<u2"), side_files={}
    )
    engine = DirectoryEngine(here)
    with pytest.raises(EngineRefused, match=r"missing: head.*added: odd.*retyped or reshaped: embed"):
        await engine.attach(versions.facts())
    await engine.close()


async def test_a_directory_of_another_stream_is_refused(make_versions, here):
    versions = make_versions()
    engine = await proved(versions, here)
    await engine.close()
    other = make_versions()
    other.stream = "beef" * 8
    engine = DirectoryEngine(here)
    with pytest.raises(EngineRefused, match="follows stream"):
        await engine.attach(other.facts())
    await engine.close()


async def test_an_owner_that_was_fenced_in_the_middle_of_its_work_takes_it_away(make_versions, here):
    """A load of it may be a whole checkpoint, and a later owner's work bears another number."""
    versions = make_versions(1)
    first = await proved(versions, here)
    second = DirectoryEngine(here)
    await second.attach(versions.facts())
    await second.prove(0, versions.vector_file(0), "v0")
    await second.prepare(versions.transaction(1))
    (here / ".dcr" / "prepared-1").write_bytes(b"drafted while the second attached")
    (here / ".dcr" / "incoming-1").mkdir()
    await first.close()
    assert {path.name for path in (here / ".dcr").iterdir()} == {"version.json", "owner.json", "prepared-2"}
    await second.swap("to-1")
    await second.close()
    assert {path.name for path in (here / ".dcr").iterdir()} == {"version.json", "owner.json"}


async def test_the_earlier_owner_is_fenced(make_versions, here):
    versions = make_versions(1)
    first = await proved(versions, here)
    await first.prepare(versions.transaction(1))
    second = DirectoryEngine(here)
    attached = await second.attach(versions.facts())
    assert attached.version == 0
    for call in (first.swap("to-1"), first.serve(), first.drop(), first.prepare(versions.transaction(1))):
        with pytest.raises(Fenced):
            await call
    await second.prepare(versions.transaction(1))
    assert (await second.swap("to-1")).version == 1
    await first.close()
    await second.close()


class TakeOver:
    """A second engine that attaches to the directory and brings it to version 1, in the middle of the first's work."""

    def __init__(self, versions, here: Path) -> None:
        self._versions, self._here = versions, here
        self._txn = msgspec.structs.replace(versions.transaction(1), id="second")
        self._begun = False
        self.left: dict[Path, bytes] = {}  #: the directory as the second has left it

    def __call__(self) -> None:
        """Once, on a worker thread of the first engine, which waits meanwhile."""
        if not self._begun:
            self._begun = True
            asyncio.run(self._act())

    async def _act(self) -> None:
        engine = await proved(self._versions, self._here)
        await engine.prepare(self._txn)
        assert (await engine.swap("second")).version == 1
        await engine.close()
        self.left = contents(self._here)


def contents(here: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in here.rglob("*")}


def do_before(monkeypatch, where: str, act) -> None:
    """Have `act` done before each call of a function, or at each pass of a failpoint."""
    if where.startswith("dcr_daemon."):
        module, _, name = where.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(where, lambda *args, **keywords: (act(), function(*args, **keywords))[1])
    else:
        monkeypatch.setattr(runtime, "failpoint", lambda name: act() if name == where else None)


DIRECTORY = "dcr_daemon.engine.directory"


@pytest.mark.parametrize(
    "where",
    [
        f"{DIRECTORY}.transactions.open_hop",
        f"{DIRECTORY}.transactions.compose",
        "disk.journal.write",
        "disk.journal.sync",
        "engine.dir.prepared",
    ],
)
async def test_an_owner_that_is_fenced_during_a_prepare_learns_it_and_writes_nothing(
    make_versions, here, monkeypatch, where
):
    """Whatever it makes of files that the next owner changes under it: sums that differ are no refusal."""
    versions = make_versions(1, rate=0.3)
    txn, second = versions.transaction(1), TakeOver(versions, here)
    first = await proved(versions, here)
    do_before(monkeypatch, where, second)
    with pytest.raises(Fenced):
        await first.prepare(txn)
    assert second.left
    for call in (first.swap(txn.id), first.attach(versions.facts()), first.status()):
        with pytest.raises(Fenced):
            await call
    await first.close()
    assert contents(here) == second.left


@pytest.mark.parametrize(
    "where", [f"{DIRECTORY}.install.build_checkpoint", "disk.tensors.write", "disk.checkpoint.sync"]
)
async def test_an_owner_that_is_fenced_during_a_load_learns_it_and_writes_nothing(
    make_versions, here, tmp_path, monkeypatch, where
):
    versions = make_versions(1)
    second = TakeOver(versions, here)
    files = [str(path) for path in versions.save(tmp_path / "anchor", 1).glob("*.safetensors")]
    first = await proved(versions, here)
    do_before(monkeypatch, where, second)
    with pytest.raises(Fenced):
        await first.load(1, files, versions.vector_file(1), "v1")
    assert second.left
    await first.close()
    assert contents(here) == second.left


@pytest.mark.parametrize("again", [False, True])
async def test_an_owner_that_is_fenced_while_an_attach_sums_learns_it(make_versions, here, monkeypatch, again):
    versions = make_versions(1)
    second = TakeOver(versions, here)
    first = await proved(versions, here) if again else DirectoryEngine(versions.save(here))
    do_before(monkeypatch, f"{DIRECTORY}.state.sum_read", second)
    with pytest.raises(Fenced):
        await first.attach(versions.facts())
    assert second.left
    await first.close()
    assert contents(here) == second.left


async def test_an_owner_that_is_fenced_while_it_waits_for_the_lock_writes_nothing(make_versions, here):
    versions = make_versions(1)
    first = await proved(versions, here)
    await first.prepare(versions.transaction(1))
    vector = versions.vector_file(0)
    owner, next_owner = (here / ".dcr" / "owner.json").read_bytes(), Checkout(here)
    for call in (
        first.swap("to-1"),
        first.prove(0, vector, "v0"),
        first.serve(),
        first.drop(),
        first.finish_adopted("to-1"),
        first.attach(versions.facts()),
    ):
        (here / ".dcr" / "owner.json").write_bytes(owner)  # the first is the owner again
        lock = next_owner.try_lock()
        assert lock is not None
        with lock:
            waiting = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            next_owner.claim("another engine")
            left = contents(here)
        with pytest.raises(Fenced):
            await waiting
        assert contents(here) == left
    await first.close()


async def test_an_owner_whose_work_fails_while_nobody_has_taken_over_hears_of_the_failure(make_versions, here):
    versions = make_versions(2)
    first = await proved(versions, here)
    with pytest.raises(EngineRefused, match="the change begins at"):
        await first.prepare(versions.transaction(2))
    await first.attach(versions.facts())
    await first.close()


class Flaky(Checkout):
    """A disk on which `bad` writes fail, then `bad_back` ways back."""

    bad, bad_back = 0, 0

    def write(self, journal, layout, *, back=False):
        left = self.bad_back if back else self.bad
        if left:
            if back:
                self.bad_back -= 1
            else:
                self.bad -= 1
            super().write(journal, layout, back=back)
            raise Corrupt("planted: reads back wrong")
        super().write(journal, layout, back=back)


async def flaky(versions, here, **faults) -> DirectoryEngine:
    engine = await proved(versions, here)
    engine._state.checkout = Flaky(here)
    for name, value in faults.items():
        setattr(engine._state.checkout, name, value)
    await engine.serve()
    await engine.prepare(versions.transaction(1))
    return engine


async def test_a_failed_write_is_tried_again(make_versions, here):
    versions = make_versions(1)
    engine = await flaky(versions, here, bad=1)
    swapped = await engine.swap("to-1")
    assert (swapped.verdict, swapped.tries) == (Verdict.COMMITTED, 2)
    assert versions.version_of(here) == 1
    await engine.close()


async def test_a_write_that_fails_twice_is_rolled_back(make_versions, here):
    versions = make_versions(1)
    engine = await flaky(versions, here, bad=2)
    swapped = await engine.swap("to-1")
    assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.ROLLED_BACK, 0, True)
    assert "planted" in swapped.reason
    assert versions.version_of(here) == 0
    assert not Checkout(here).dirty()
    assert (here / "config.json").exists()
    await engine.prepare(versions.transaction(1, name="again"))
    assert (await engine.swap("again")).version == 1
    await engine.close()


async def test_a_directory_that_can_go_neither_way_keeps_its_mark_until_attach(make_versions, here):
    versions = make_versions(1)
    engine = await flaky(versions, here, bad=2, bad_back=1)
    with pytest.raises(Corrupt):
        await engine.swap("to-1")
    assert Checkout(here).dirty() is not None
    assert not (here / "config.json").exists()
    with pytest.raises(Corrupt, match="between two versions"):
        Checkpoint(here)
    assert (await engine.status()).version is None
    again = DirectoryEngine(here)
    assert (await again.attach(versions.facts())).version == 1
    assert versions.version_of(here) == 1
    assert (here / "config.json").exists()
    outcome = await again.outcome("to-1")
    assert (outcome.verdict, outcome.version) == (Verdict.COMMITTED, 1)
    await engine.close()
    await again.close()


async def test_a_disk_that_takes_no_journal_leaves_the_weights_as_they_are(make_versions, here):
    versions = make_versions(1)
    engine = await proved(versions, here)
    await engine.prepare(versions.transaction(1))
    obstacle = here / ".dcr" / "journal" / "in the way"
    obstacle.mkdir(parents=True)
    with pytest.raises(ResourceExhausted, match=r"cannot write .*directory"):
        await engine.swap("to-1")
    assert versions.version_of(here) == 0
    assert (here / "config.json").exists()
    obstacle.rmdir()
    obstacle.parent.rmdir()
    assert (await engine.attach(versions.facts())).version == 0
    await engine.prepare(versions.transaction(1))
    assert (await engine.swap("to-1")).version == 1
    await engine.close()


async def test_a_damaged_journal_under_a_mark_leaves_only_an_anchor(make_versions, here, tmp_path):
    versions = make_versions(1)
    engine = await flaky(versions, here, bad=2, bad_back=1)
    with pytest.raises(Corrupt):
        await engine.swap("to-1")
    await engine.close()
    journal = here / ".dcr" / "journal"
    body = bytearray(journal.read_bytes())
    body[len(body) // 2] ^= 1
    journal.write_bytes(body)
    again = DirectoryEngine(here)
    assert (await again.attach(versions.facts())).version is None
    anchor = versions.save(tmp_path / "anchor", 1)
    await again.load(1, [str(anchor / "model.safetensors")], versions.vector_file(1), "v1")
    assert versions.version_of(here) == 1
    assert (here / "config.json").exists()
    await again.close()


def test_engines_are_named_by_url(tmp_path):
    engine = open_engine(f"dir://{tmp_path}/a%20b", state=tmp_path)
    assert isinstance(engine, DirectoryEngine)
    assert engine.path == tmp_path / "a b"
    for url in ("dir://host/x", "dir:///", "ftp:///x", "/models", "vllm://sock", "dir:///x?y=1"):
        with pytest.raises(UsageError):
            open_engine(url, state=tmp_path)


async def test_an_attach_to_many_small_tensors_is_few_tasks(make_versions, here):
    layout = Layout([TensorSpec(f"t{n:06}", "U8", (1,)) for n in range(3 * BATCH_BLOCKS)])
    versions = make_versions(layout=layout)
    with running_tasks() as tasks:
        engine = await proved(versions, here)
    await engine.close()
    assert tasks.started < 20
