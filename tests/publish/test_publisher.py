from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores.wrapped import WrappedStore
from support.streams.publish_world import PublishWorld, StreamReader, same_weights, step_weights

import dcr_daemon
from dcr_daemon.errors import Fenced, Incompatible, NotFound, ResourceExhausted, StoreUnavailable, UsageError
from dcr_daemon.events import Aborted, AnchorPut, ChunkPut, Event, Opened, Rounded
from dcr_daemon.publish.publisher import Publisher
from dcr_daemon.store.port import Outcome

torch = pytest.importorskip("torch")


def publisher(world: PublishWorld, **more: Any) -> Publisher:
    defaults: dict[str, Any] = {"base": world.base, "create": True, "state": world.state, "emit": world.events}
    return Publisher(world.url, **defaults | more)


def small_model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def bits_of(model: Any, names: Any) -> dict[str, np.ndarray]:
    state = model.state_dict()
    return {n: state[n].detach().bfloat16().view(torch.int16).numpy().reshape(-1).view("<u2").copy() for n in names}


def test_a_model_in_training_is_published_step_by_step(world: PublishWorld) -> None:
    """fp32 masters, a tied head, real AdamW steps: every version is the bf16 model of its step."""
    model = small_model()
    model.bfloat16().save_pretrained(world.root / "qwen")
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = []
    with publisher(world, base=world.root / "qwen") as target:
        names = [spec.name for spec in target._coordinator.layout]
        assert "lm_head.weight" not in names
        base = bits_of(model, names)
        for step in range(3):
            loss = model(input_ids=torch.randint(0, 96, (2, 8)), labels=torch.randint(0, 96, (2, 8))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update = target.publish(model, step=step, metadata={"loss": float(loss.detach())})
            wanted.append(bits_of(model, names))
            with torch.no_grad():  # the weights may change at once
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            assert update.version == step + 1
            if step == 1:
                assert update.wait_sealed(60).step == 1
                assert update.sealed
    versions = StreamReader(world.url, base).versions()
    assert len(versions) == 4
    assert all(same_weights(versions[n + 1], weights) for n, weights in enumerate(wanted))
    assert [(event.given, event.canonical) for event in world.events.of(Rounded)] == [("F32", "BF16")]
    seals = [record for record in world.reader.records() if type(record).__name__ == "Seal"]
    assert all(set(seal.metadata) == {"loss"} for seal in seals)


@pytest.mark.parametrize("form", ["mapping", "stream", "module"])
def test_every_form_of_input_gives_the_same_version(world: PublishWorld, form: str) -> None:
    new = step_weights(world.weights, seed=1)
    tensors = world.tensors(new)

    class Module:
        def state_dict(self) -> dict[str, Any]:
            return tensors

    def stream() -> Iterator[tuple[str, Any]]:
        """Reuses one buffer, as a gather into a bucket does."""
        buffer = torch.empty(1 << 16, dtype=torch.uint8)
        for name, tensor in tensors.items():
            piece = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)[: tensor.numel()]
            yield name, piece.copy_(tensor.reshape(-1)).view(tensor.shape)

    with publisher(world) as target:
        weights = {"mapping": tensors, "stream": stream(), "module": Module()}[form]
        target.publish(weights).wait_sealed()
    assert same_weights(world.reader.versions()[1], new)


def test_layouts_in_memory_do_not_matter(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    tensors = world.tensors(new)
    tensors["embed.weight"] = tensors["embed.weight"].t().contiguous().t()
    tensors["layer.0.weight"] = torch.stack([tensors["layer.0.weight"]] * 2, dim=1)[:, 1]
    assert not tensors["embed.weight"].is_contiguous()
    with publisher(world) as target:
        target.publish(tensors).wait_sealed()
    assert same_weights(world.reader.versions()[1], new)


def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_opened(world: PublishWorld) -> None:
    good = world.tensors(step_weights(world.weights, seed=1))
    bad: dict[str, Any] = {
        "added: new": {**good, "new": torch.arange(3.0)},
        "missing: tiny": {name: tensor for name, tensor in good.items() if name != "tiny"},
        "retyped: norm.weight": {**good, "norm.weight": good["norm.weight"].half()},
        "reshaped: norm.weight": {**good, "norm.weight": good["norm.weight"].reshape(4, 8)},
        "added: mini.*missing: tiny.*renamed": {
            **{name: tensor for name, tensor in good.items() if name != "tiny"}, "mini": good["tiny"],
        },
    }  # fmt: skip
    with publisher(world) as target:
        for what, tensors in bad.items():
            with pytest.raises(Incompatible, match=what) as caught:
                target.publish(tensors)
            assert ("missing" in what) == ("missing" in str(caught.value)), "what does not fit is not missing too"
            assert not world.events.of(Opened)
            with pytest.raises(Incompatible, match=what):
                target.publish(iter(tensors.items()))
            world.events.clear()
        with pytest.raises(Incompatible, match="not a tensor"):
            target.publish({**good, "tiny": 3})
        target.publish(good).wait_sealed()
    assert same_weights(world.reader.versions()[1], step_weights(world.weights, seed=1))


def test_names_of_a_wrapped_model_are_known_or_the_error_says_what_to_do(world: PublishWorld) -> None:
    good = world.tensors(step_weights(world.weights, seed=1))
    deep = {"_orig_mod." + name.replace("layer.0.", "layer.0._orig_mod."): tensor for name, tensor in good.items()}
    wrapped = {f"module.{name}": tensor for name, tensor in good.items()}
    fused = {**good, "layer.weight": torch.zeros(2, 3)}
    with publisher(world) as target:
        assert target.publish(deep).wait_sealed().changed
        assert target.publish(iter(deep.items())).wait_sealed().changed == 0
        for form in (dict, lambda tensors: iter(tensors.items())):
            with pytest.raises(Incompatible, match=r"begin with 'module\.'"):
                target.publish(form(wrapped))
            with pytest.raises(Incompatible, match="revert_weight_conversion"):
                target.publish(form(fused))
    assert same_weights(world.reader.versions()[1], step_weights(world.weights, seed=1))


def test_steps_may_be_numpys_or_torchs_integers(world: PublishWorld) -> None:
    good = world.tensors(world.weights)
    with publisher(world) as target:
        assert [target.publish(good, step=step).wait_sealed().step for step in (np.int64(3), torch.tensor(4))] == [3, 4]


def test_a_fork_of_the_training_process_neither_hangs_nor_harms_the_publisher(world: PublishWorld) -> None:
    """Data loaders fork. The child has no loop thread: waiting for it would be for ever."""
    good = world.tensors(world.weights)
    with publisher(world) as target:
        target.publish(good).wait_sealed()
        with pytest.raises(UsageError, match="pickled"):
            pickle.dumps(target)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                with target:
                    target.publish(good)
            except UsageError as error:
                os._exit(0 if "fork" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert target.publish(good).wait_sealed().version == 2


def test_an_alias_is_dropped_and_equal_constants_are_not(world: PublishWorld) -> None:
    tensors = world.tensors(step_weights(world.weights, seed=1))
    with publisher(world) as target:
        target.publish({**tensors, "lm_head.weight": tensors["embed.weight"]}).wait_sealed()
        ones = torch.ones_like(tensors["norm.weight"])
        with pytest.raises(Incompatible, match=r"added: q_norm\.weight"):
            target.publish({**tensors, "norm.weight": ones, "q_norm.weight": ones.clone()})
        target.publish({**tensors, "norm.weight": ones, "q_norm.weight": ones}).wait_sealed()
    with publisher(world, ignore=["q_*"]) as target:
        target.publish({**tensors, "norm.weight": ones, "q_norm.weight": ones.clone()}).wait_sealed()


def test_an_error_of_the_callers_own_generator_undoes_the_attempt(world: PublishWorld) -> None:
    good = world.tensors(step_weights(world.weights, seed=1))

    def broken() -> Iterator[tuple[str, Any]]:
        yield "embed.weight", torch.zeros_like(good["embed.weight"])
        raise RuntimeError("the trainer's own")

    with publisher(world) as target:
        with pytest.raises(RuntimeError, match="own"):
            target.publish(broken())
        assert [event.reason for event in world.events.of(Aborted)] == ["RuntimeError: the trainer's own"]
        target.publish(good).wait_sealed()
    assert same_weights(world.reader.versions()[1], step_weights(world.weights, seed=1))


def test_misuse_is_said_as_such(world: PublishWorld) -> None:
    good = world.tensors(world.weights)
    with pytest.raises(NotFound, match="create"):
        publisher(world, create=False)
    with pytest.raises(UsageError, match="codec"):
        publisher(world, codec="gzip")
    with publisher(world) as target:
        for weights in (3, ["x"], [("x",)]):
            with pytest.raises(UsageError, match=r"publish\(\)"):
                target.publish(weights)
        with pytest.raises(UsageError, match="JSON"):
            target.publish(good, metadata={"x": object()})
        with pytest.raises(UsageError, match="mapping"):
            target.publish(good, metadata="loss")
        for step in ("5", 1.5, 1 << 63, torch.zeros(2)):
            with pytest.raises(UsageError, match="step"):
                target.publish(good, step=step)
        with pytest.raises(UsageError, match="limit"):
            target.publish(good, metadata={"x": "y" * (1 << 17)})
        assert target.publish(good).wait_sealed().changed == 0
    with pytest.raises(UsageError, match="closed"):
        target.publish(good)
    target.close()
    with pytest.raises(Incompatible, match="shard"):
        dcr_daemon.publish.inputs.sources.local_tensor("w", FakeDTensor(torch.zeros(2)))


class FakeDTensor(torch.Tensor):
    """As much of a DTensor as is looked at."""

    placements = (type("Shard", (), {"is_replicate": lambda self: False})(),)
    device_mesh = type("Mesh", (), {"size": lambda self: 2})()

    def __new__(cls, data: Any) -> FakeDTensor:
        return torch.Tensor._make_subclass(cls, data)  # type: ignore[no-any-return]

    def detach(self) -> FakeDTensor:
        return self

    def to_local(self) -> Any:
        return self


def test_two_publishers_and_the_older_one_is_fenced_for_good(world: PublishWorld) -> None:
    weights = [step_weights(world.weights, seed=n) for n in range(3)]
    first = publisher(world, name="a")
    first.publish(world.tensors(weights[0])).wait_sealed()
    second = publisher(world, name="b", take_over=True, state=world.root / "elsewhere")
    second.publish(world.tensors(weights[1])).wait_sealed()
    for _ in range(2):
        with pytest.raises(Fenced):
            first.publish(world.tensors(weights[2])).wait_sealed()
    first.close()
    second.close()
    versions = world.reader.versions()
    assert len(versions) == 3
    assert same_weights(versions[2], weights[1])
    assert world.reader.kinds().count("Release") == 1


def test_an_error_behind_is_told_once_and_the_next_update_goes_on(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_daemon.publish import publisher as module

    class Flaky(WrappedStore):
        down = False

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            return Outcome.UNKNOWN if self.down and ".dcr" in key else await self.inner.create(key, body)

    stores = []

    async def open_store(url: str, **options: Any) -> Any:
        stores.append(Flaky(world.store()))
        return stores[-1]

    monkeypatch.setattr(module, "open_store", open_store)
    weights = [step_weights(world.weights, seed=n) for n in range(3)]
    with publisher(world, patience=0.1) as target:
        stores[0].down = True
        update = target.publish(world.tensors(weights[0]))
        with pytest.raises(StoreUnavailable):
            target.publish(world.tensors(weights[1]))
        assert not update.sealed
        update = target.publish(world.tensors(weights[1]))
        with pytest.raises(StoreUnavailable):
            update.wait_sealed()
        stores[0].down = False
        assert target.publish(world.tensors(weights[2])).wait_sealed().version == 1
    assert same_weights(world.reader.versions()[1], weights[2])
    assert len(world.events.of(Aborted)) == 2


def test_anchors_follow_their_policy(world: PublishWorld) -> None:
    with publisher(world, anchor_every=2, upload_base=False) as target:
        for n in range(4):
            target.publish(world.tensors(step_weights(world.weights, seed=n)))
    assert [event.version for event in world.events.of(AnchorPut)] == [2, 4]
    world.reader.versions()


def test_importing_the_package_loads_neither_torch_nor_numba(tmp_path: Path) -> None:
    code = (
        "import sys, dcr_daemon, dcr_daemon.publish.watch.watcher; dcr_daemon.Publisher;"
        "print([m for m in ('torch', 'numba', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("landed", [True, False])
def test_a_failure_is_told_only_when_it_is_one(
    world: PublishWorld, landed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal was sent and the bucket is silent: that is neither a failure nor a version, until somebody looks."""
    from dcr_daemon.ledger import ledger as ledger_module
    from dcr_daemon.publish import publisher as module
    from dcr_daemon.publish.group import leader as session_module

    class Silent(WrappedStore):
        down, tripped = False, False

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            if b'"kind":"seal"' in bytes(body) and not self.tripped:
                self.down = self.tripped = True
                if landed:
                    await self.inner.create(key, body)
            return Outcome.UNKNOWN if self.down else await self.inner.create(key, body)

        async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
            if self.down:
                raise StoreUnavailable("the bucket is silent")
            return await self.inner.get(key, limit=limit)  # type: ignore[no-any-return]

    store = Silent(world.store())

    async def open_store(url: str, **options: Any) -> Any:
        return store

    monkeypatch.setattr(module, "open_store", open_store)
    monkeypatch.setattr(ledger_module, "TRIES", 2)
    monkeypatch.setattr(session_module, "RESOLVE_PAUSE", 0.01)
    weights = [step_weights(world.weights, seed=n) for n in range(2)]
    with publisher(world, patience=0.1) as target:
        first = target.publish(world.tensors(weights[0]))
        with pytest.raises(StoreUnavailable, match="not known"):
            first.wait_sealed()
        store.down = False
        second = target.publish(world.tensors(weights[1])).wait_sealed()
        # Asked again, an undecided record is put again with the same bytes: it lands either way (must L1).
        assert first.sealed
        assert (first.wait_sealed().version, second.version) == (1, 2)
    versions = world.reader.versions()
    assert same_weights(versions[1], weights[0])
    assert same_weights(versions[2], weights[1])


def test_a_seal_that_can_be_read_is_told_although_nothing_after_it_can(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_daemon.publish import publisher as module

    class Fading(WrappedStore):
        sealed = ""

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            outcome = await self.inner.create(key, body)
            if self.sealed or b'"kind":"seal"' not in bytes(body):
                return outcome  # type: ignore[no-any-return]
            self.sealed = key
            raise StoreUnavailable("the answer is lost")

        async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
            if self.sealed and key > self.sealed:
                raise StoreUnavailable("the bucket is silent")
            return await self.inner.get(key, limit=limit)  # type: ignore[no-any-return]

    store = Fading(world.store())

    async def open_store(url: str, **options: Any) -> Any:
        return store

    monkeypatch.setattr(module, "open_store", open_store)
    with publisher(world, patience=1.0) as target:
        assert target.publish(world.tensors(step_weights(world.weights, seed=1))).wait_sealed().version == 1
        store.sealed = ""


def test_a_sealed_version_that_cannot_be_remembered_is_not_told_as_a_failure(world: PublishWorld) -> None:
    """The state directory takes nothing just then: the error says that the fate is open; the next call learns it."""
    weights = [step_weights(world.weights, seed=n) for n in range(2)]
    in_the_way: list[Path] = []

    def block(event: Event) -> None:
        """From the first chunk on, so that the seal is what cannot be remembered."""
        if isinstance(event, ChunkPut) and not in_the_way:
            (mark,) = world.state.rglob("mark.json")
            in_the_way.append(mark.with_name(f".{mark.name}.partial"))
            in_the_way[0].mkdir()

    with publisher(world, emit=block) as target:
        first = target.publish(world.tensors(weights[0]))
        with pytest.raises(ResourceExhausted, match="not known"):
            first.wait_sealed()
        in_the_way[0].rmdir()
        assert target.publish(world.tensors(weights[1])).wait_sealed().version == 2
        assert first.wait_sealed().version == 1
    assert same_weights(world.reader.versions()[1], weights[0])


def test_a_dtensor_of_one_rank_is_taken(world: PublishWorld, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    new = step_weights(world.weights, seed=1)
    tensors = world.tensors(new)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensors["embed.weight"] = distribute_tensor(tensors["embed.weight"], mesh, [Shard(0)])
        with publisher(world) as target:
            target.publish(tensors).wait_sealed()
    finally:
        dist.destroy_process_group()
    assert same_weights(world.reader.versions()[1], new)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_are_read_after_the_work_queued_on_them(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    tensors = {name: tensor.cuda() for name, tensor in world.tensors(new).items()}
    with publisher(world) as target:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late = {name: tensor.clone() for name, tensor in tensors.items()}
            target.publish(late).wait_sealed()
    assert same_weights(world.reader.versions()[1], new)


def test_an_interrupt_while_diffing_leaves_the_publisher_usable(world: PublishWorld) -> None:
    good = world.tensors(step_weights(world.weights, seed=1))

    def interrupted() -> Iterator[tuple[str, Any]]:
        yield "embed.weight", torch.zeros_like(good["embed.weight"])
        raise KeyboardInterrupt

    with publisher(world) as target:
        with pytest.raises(KeyboardInterrupt):
            target.publish(interrupted())
        target.publish(good).wait_sealed()
    assert same_weights(world.reader.versions()[1], step_weights(world.weights, seed=1))


def test_a_publisher_without_its_state_is_told_about_names(world: PublishWorld) -> None:
    with publisher(world), pytest.raises(Fenced, match="--name"):
        publisher(world, state=world.root / "elsewhere")


def test_a_fork_does_not_wait_for_a_fate_that_nobody_will_tell_it(world: PublishWorld) -> None:
    """Data loaders fork in the middle of an update; the copy of it in the child is never told anything."""
    from dcr_daemon.publish.version.fate import AttemptFate
    from dcr_daemon.publish.version.update import Update

    parent, failed = os.getpid(), AttemptFate(1)
    told, untold = (Update(fate, lambda: os.getpid() == parent) for fate in (failed, AttemptFate(2)))
    failed.set_aborted(StoreUnavailable("down"))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            with pytest.raises(StoreUnavailable):
                told.wait_sealed()
            untold.wait_sealed()
        except UsageError as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


BLACKHOLED = """
import asyncio, json, sys, time
from dcr_daemon.publish import publisher as module
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.port import Outcome

class Hole(FileStore):
    down = False
    async def create(self, key, body):
        if self.down:
            await asyncio.sleep(3600)
        return await super().create(key, body)
    async def get(self, key, *, limit, keep=None):
        if self.down:
            await asyncio.sleep(3600)
        return await super().get(key, limit=limit)

async def open_store(url, **options):
    from pathlib import Path
    return Hole(Path(url.removeprefix("file://")))

module.open_store = open_store
import torch
from safetensors.torch import load_file
url, base, state, when = sys.argv[1:]
tensors = load_file(base + "/model.safetensors")

def slowly():
    for n, item in enumerate(tensors.items()):
        if n == 3 and when == "in the iterator":
            target._store.down = True
            print("ready", flush=True)
            time.sleep(3600)
        yield item

with module.Publisher(url, base=base, create=True, state=state) as target:
    target.publish(tensors).wait_sealed()
    if when == "in the iterator":
        target.publish(slowly())
    target._store.down = True
    print("ready", flush=True)
    if when == "while it begins":
        target.publish(tensors)
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", [
    "in the iterator",
    pytest.param("while it begins", marks=pytest.mark.slow),
    pytest.param("between updates", marks=pytest.mark.slow),
])  # fmt: skip
def test_ctrl_c_ends_a_trainer_soon_even_if_the_bucket_swallows_everything(world: PublishWorld, when: str) -> None:
    """And nothing is broken by it: the next process publishes on."""
    command = [sys.executable, "-c", BLACKHOLED, world.url, str(world.base), str(world.state), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    weights = step_weights(world.weights, seed=3)
    with publisher(world) as target:
        target.publish(world.tensors(weights)).wait_sealed()
        version = target.version
    assert same_weights(world.reader.versions()[version], weights)


def test_no_call_of_publish_compiles_a_kernel(world: PublishWorld) -> None:
    """In a process of its own: here the kernels are compiled already."""
    program = f"""
import torch
from dcr_daemon.codec import kernels
from dcr_daemon.publish.publisher import Publisher

def compiled():
    return [len(k.signatures) for k in vars(kernels).values() if hasattr(k, "signatures")]

from safetensors.torch import load_file
weights = load_file({str(world.base / "model.safetensors")!r})
with Publisher({world.url!r}, base={str(world.base)!r}, create=True, state={str(world.state)!r}) as publisher:
    before = compiled()
    weights["embed.weight"][3] += 1
    weights["layer.0.weight"].view(torch.int16)[::2] += 1
    publisher.publish(weights).wait_sealed(60)
    assert before == compiled() and any(before), (before, compiled())
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"NUMBA_CACHE_DIR": str(world.root)})
