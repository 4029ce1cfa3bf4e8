"""A Hugging Face checkpoint: one safetensors file, or a directory of shards with or without an index.

Reading opens headers only. Writing is all or nothing: a directory appears under its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import HEADER_LIMIT, SafetensorsFile, write_safetensors
from dcr_daemon.checkpoint.tied import is_head, ties_embeddings
from dcr_daemon.checkpoint.weight_files import WeightFiles, choose_weight_files
from dcr_daemon.disk import disk_error, out_of_handles, sync_directory, sync_file
from dcr_daemon.errors import Corrupt, DcrError, Incompatible, NotFound
from dcr_daemon.untrusted import load_json
from dcr_daemon.wording import shorten

INDEX = "model.safetensors.index.json"
DIRTY = ".dcr/dirty"  #: the mark of a directory that an engine is changing in place
SIDE_FILE_LIMIT = 64 << 20  #: bytes of one side file; a larger one is not a side file
#: Side files by suffix. Code (`*.py`) never travels through a bucket.
SIDE_FILE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
#: Written by trainers beside a model, of no use to a server.
NOT_SIDE_FILES = frozenset({"trainer_state.json", "latest_checkpointed_iteration.txt"})


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> file name in the same directory.

    Raises:
        Corrupt: it does not parse, or names a file outside its directory.
    """
    try:
        if not path.is_file() or path.stat().st_size > HEADER_LIMIT:
            raise ValueError(f"it is no file of at most {HEADER_LIMIT} bytes")
        pairs = load_json(path.read_bytes())["weight_map"]
        if not isinstance(pairs, dict) or not all(isinstance(file, str) for file in pairs.values()):
            raise ValueError("its weight_map is not a table of names")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(f"{path} is not a safetensors index: {error}", hint="write it again") from error
    for file in pairs.values():
        if Path(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise Corrupt(f"{path} names {file[:200]!r}, which is no safetensors file beside it")
    return pairs


def find_index(directory: Path) -> Path | None:
    """The index file of a directory, if any: `INDEX` among several, as loaders choose; else `Incompatible`."""
    found = sorted(directory.glob("*.safetensors.index.json"))
    if len(found) > 1 and directory / INDEX not in found:
        raise Incompatible(
            f"{directory} has several indexes: {', '.join(path.name for path in found)}",
            hint=f"leave one of them, or name it {INDEX}",
        )
    return directory / INDEX if directory / INDEX in found else next(iter(found), None)


def tensor_files(path: Path) -> list[Path]:
    """Safetensors files of a checkpoint, sorted: `weight_files` says which.

    Raises:
        NotFound: there are none, or one that the index names is absent.
    """
    if path.is_file():
        return [path]
    return [path / name for name in _weight_files(path).names]


def _weight_files(directory: Path) -> WeightFiles:
    if not directory.is_dir():
        raise NotFound(f"there is no checkpoint at {directory}")
    index, present = find_index(directory), [path.name for path in directory.glob("*.safetensors")]
    if index is None:
        if not present:
            raise NotFound(f"{directory} holds no *.safetensors", hint="give a Hugging Face checkpoint directory")
        return choose_weight_files(present, single=False)  # a stream may have been created from all of them
    chosen = choose_weight_files(present, read_index(index), index_name=index.name)
    if absent := sorted(set(chosen.names) - set(present)):
        raise NotFound(
            f"{index} names files that are not there: {shorten(absent)}",
            hint="write the checkpoint again; if it lies in other files, remove the index",
        )
    return chosen


class Checkpoint:
    """An open checkpoint; a context manager. Views from `bits` must be dropped before `close`.

    Raises:
        NotFound: nothing there, or a file that the index names is absent.
        Corrupt: a file is truncated, the index disagrees with the files, or the directory is being changed.
        Incompatible: no safetensors, a tensor occurs twice, or the path cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files: list[SafetensorsFile] = []
        try:
            if (self.path / DIRTY).exists():
                hint = "start its subscriber: attaching repairs it"
                raise Corrupt(f"{self.path} is between two versions (must E8)", hint=hint)
            for shard in tensor_files(self.path):
                self.files.append(SafetensorsFile(shard))
            self._home = {spec.name: file for file in self.files for spec in file.specs}
            self.layout = Layout(spec for file in self.files for spec in file.specs)
            self._check_index()
        except OSError as error:
            self.close()
            if out_of_handles(error):
                raise disk_error(error, self.path) from error
            raise Incompatible(f"{self.path} cannot be read: {error.strerror}", hint="check its permissions") from error
        except DcrError:
            self.close()
            raise

    def _check_index(self) -> None:
        index = find_index(self.path) if self.path.is_dir() else None
        if index is None or not _weight_files(self.path).by_index:
            return
        named, found = read_index(index), {name: file.path.name for name, file in self._home.items()}
        if named != found:
            wrong = sorted(name for name in named.keys() | found.keys() if named.get(name) != found.get(name))
            if all(is_head(name) and name not in found for name in wrong) and ties_embeddings(self._config()):
                return  # it lists the head under a name of its own
            raise Corrupt(f"{index} disagrees with its files about {shorten(wrong)}", hint="write it again")

    def _config(self) -> dict[str, Any] | None:
        path = self.path / "config.json"
        try:
            config = load_json(path.read_bytes()) if path.stat().st_size <= SIDE_FILE_LIMIT else None
        except (OSError, ValueError, RecursionError):
            return None
        return config if isinstance(config, dict) else None

    @property
    def passed_by(self) -> list[str]:
        """Names of weight files beside this checkpoint's own that are not read."""
        return _weight_files(self.path).passed_by if self.path.is_dir() else []

    def bits(self, name: str) -> Bits:
        """The bits of one tensor as unsigned integers [elements], a view over its file. `NotFound` for an unknown
        name."""
        return self.file(name).bits(name)

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        try:
            return self._home[name]
        except KeyError:
            raise NotFound(f"{self.path} holds no tensor {name}") from None

    def side_files(self) -> dict[str, bytes]:
        """Small side files (config, tokenizer) by name."""
        return read_side_files(self.path) if self.path.is_dir() else {}

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_side_files(directory: Path) -> dict[str, bytes]:
    """The side files of a checkpoint that a server needs: config, tokenizer, templates."""
    found = {}
    for path in sorted(directory.iterdir()):
        wanted = path.suffix in SIDE_FILE_SUFFIXES and not path.name.startswith(".") and path.name not in NOT_SIDE_FILES
        if (
            wanted
            and not path.name.endswith(".index.json")
            and path.is_file()
            and path.stat().st_size <= SIDE_FILE_LIMIT
        ):
            found[path.name] = path.read_bytes()
    return found


def plan_tensor_files(layout: Layout, shard_bytes: int) -> list[list[TensorSpec]]:
    """Whole tensors in files of about `shard_bytes`; one that is larger gets a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in layout:
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def write_checkpoint(
    out: Path,
    layout: Layout,
    *,
    bits_of: Callable[[str], Bits],
    side_files: Mapping[str, bytes] | None = None,
    shard_bytes: int = 1 << 30,
) -> None:
    """Write a plain Hugging Face checkpoint: `model.safetensors`, or shards with an index, and the side files.

    Args:
        out: a directory that is absent or empty; it appears whole, by a rename.
        bits_of: a tensor's bits as unsigned integers [elements], by name.
        side_files: side files by name.

    Raises:
        Incompatible: `out` holds something already.
        ResourceExhausted: the disk is full; nothing is left behind.
    """
    out = out.absolute()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise Incompatible(f"{out} is not empty", hint="name an empty or a new directory")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process of this number that was killed: 1 in a container
    try:
        partial.mkdir(parents=True)
        _write_shards(partial, plan_tensor_files(layout, shard_bytes), layout=layout, bits_of=bits_of)
        for name, body in (side_files or {}).items():
            _write_file(partial / Path(name).name, body)
        sync_directory(partial, site="checkpoint")
        partial.rename(out)
        sync_directory(out.parent, site="checkpoint")
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    directory: Path, shards: list[list[TensorSpec]], *, layout: Layout, bits_of: Callable[[str], Bits]
) -> None:
    many, weight_map = len(shards) > 1, {}
    for n, specs in enumerate(shards, start=1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        write_safetensors(directory / name, [(spec, bits_of(spec.name)) for spec in specs], metadata={"format": "pt"})
        weight_map.update({spec.name: name for spec in specs})
    if many:
        index = {"metadata": {"total_size": layout.nbytes}, "weight_map": weight_map}
        _write_file(directory / INDEX, json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False).encode())


def _write_file(path: Path, body: bytes) -> None:
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        sync_file(file.fileno(), path, site="checkpoint")
