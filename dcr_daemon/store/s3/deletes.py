"""Deletes objects many at a time; one at a time where a store has no multi-object delete, or not for us."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any, Protocol

from dcr_daemon.errors import Incompatible, KeyNotFound
from dcr_daemon.store.retry import Transient
from dcr_daemon.store.s3.attempt import Try
from dcr_daemon.store.s3.faults import refused_keys
from dcr_daemon.task_limiter import run_limited

DELETE_BATCH = 1000  #: objects of one multi-object delete
AT_ONCE = 8  #: single deletes at a time, and about those after which a folder is given up

Refused = dict[str, Incompatible]
"""Keys that the store does not let us delete, each with why."""


class Request(Protocol):
    """Sends a request until it is answered, as `S3Store._request`."""

    async def __call__(self, operation: str, key: str, call: Any, *, what: str = "") -> Any: ...


class Deletes:
    """Deletes objects of the stream below `root` in a bucket."""

    def __init__(self, client: Any, bucket: str, root: str, *, url: str, request: Request) -> None:
        self._client, self._bucket, self._root = client, bucket, root
        self._url, self._request = url, request
        self._one_by_one = False  #: this store has refused to delete many at a time, and deleted them one by one

    async def delete(self, keys: Sequence[str]) -> Refused:
        """Delete at most `DELETE_BATCH` objects. Raises `StoreUnavailable`."""
        if self._one_by_one:
            return await self._each(keys)
        try:
            return await self._together(keys)
        except Incompatible:
            # Whatever the store has against the whole request: a single delete says what it has against an object.
            refused = await self._each(keys)
            self._one_by_one = len(refused) < len(keys)
            return refused

    async def _together(self, keys: Sequence[str]) -> Refused:
        waiting, refused = set(keys), Refused()

        async def remove(_: Try) -> None:
            objects = [{"Key": self._root + key} for key in sorted(waiting)]
            answer = await self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            again, denied = refused_keys(answer.get("Errors", ()), where=self._url)
            refused.update({name.removeprefix(self._root): error for name, error in denied.items()})
            waiting.intersection_update(name.removeprefix(self._root) for name in again)
            if waiting:
                raise Transient(f"{len(waiting)} of {len(objects)} objects were not deleted")

        await self._request("delete", keys[0], remove, what=f"delete {len(keys)} objects below {self._url}")
        return refused

    async def _each(self, keys: Sequence[str]) -> Refused:
        """One by one. A folder is given up when none of some objects from all over it may be deleted: policies are by
        folder, while locks are by object, or by age."""
        folders = dict[str, list[str]]()
        for key in keys:
            folders.setdefault(key.partition("/")[0], []).append(key)
        refused = Refused()
        for members in folders.values():
            tried = sorted({*members[:: ceil(len(members) / AT_ONCE)], members[-1]})
            others = sorted(set(members) - set(tried))
            denied = await self._singly(tried)
            if len(denied) == len(tried):
                denied |= dict.fromkeys(others, denied[tried[0]])
            else:
                denied |= await self._singly(others)
            refused |= denied
        return refused

    async def _singly(self, keys: Sequence[str]) -> Refused:
        answers = await run_limited((partial(self._one, key) for key in keys), AT_ONCE)
        return {key: error for key, error in zip(keys, answers, strict=True) if error}

    async def _one(self, key: str) -> Incompatible | None:
        async def remove(_: Try) -> None:
            await self._client.delete_object(Bucket=self._bucket, Key=self._root + key)

        try:
            await self._request("delete", key, remove)
        except KeyNotFound:  # gone already, as some stores say
            return None
        except Incompatible as error:
            return error
        return None
