"""`Publisher`: a training process publishes its own weights; one call of `publish` is one update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_daemon.events import Emit, discard


@dataclass(frozen=True, slots=True)
class SealedVersion:
    """A version that exists: `seq` is its place in the ledger, `changed` counts elements, sizes are in bytes."""

    version: int
    step: int | None
    seq: int
    changed: int
    elements: int
    bytes: int
    dense_bytes: int


class Update:
    """One call of `publish`: an attempt, later a version."""

    @property
    def version(self) -> int:
        raise NotImplementedError

    @property
    def sealed(self) -> bool:
        raise NotImplementedError

    def wait_sealed(self, timeout: float | None = None) -> SealedVersion:
        raise NotImplementedError


class Publisher:
    def __init__(
        self,
        stream: str,
        *,
        base: str | Path | None = None,
        create: bool = False,
        name: str | None = None,
        take_over: bool = False,
        state: str | Path | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        codec: str = "auto",
        ignore: Sequence[str] = (),
        upload_base: bool = True,
        anchor_every: int | None = None,
        anchor_share: float | None = 1.0,
        emit: Emit = discard,
    ) -> None:
        raise NotImplementedError

    def publish(
        self,
        weights: Any | Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Update:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
