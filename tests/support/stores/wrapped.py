"""A store around another one, for subclasses that make one operation fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcr_daemon.store.port import Outcome, Store


class WrappedStore:
    """Passes every request to `inner`. Subclasses override the operation that fails."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url = inner, inner.url

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        return await self.inner.get(key, limit=limit, keep=keep)

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        return await self.inner.create(key, body)

    async def overwrite(self, key: str, body: bytes) -> None:
        await self.inner.overwrite(key, body)

    def list(self, prefix: str) -> Any:
        return self.inner.list(prefix)

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)

    async def close(self) -> None:
        await self.inner.close()
