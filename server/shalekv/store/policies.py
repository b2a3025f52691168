"""The access policy in the store: `access/<version>.policy`, the version from 1 on.

A change creates the next version if it is absent. That is the compare-and-swap: of two changes of
one version, one creates the object, and the other finds it. Nothing deletes a version, so the
highest is the newest, and no name is ever used again. Who knows a version asks for the next one,
which takes one request as long as there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shalekv.errors import (
    IllegalState,
    InvalidRequest,
    ObjectNotFound,
    PolicyChanged,
    WrongObject,
)
from shalekv.format.access import decode_policy, encode_policy
from shalekv.format.names import ACCESS_FOLDER, UUID_BYTES, parse_policy_name, policy_name
from shalekv.protocol.access import SECRET_BYTES, Policy, check_policy
from shalekv.store.cas import CasStore, Taken

POLICY_BYTES_MAX = 1 << 20  # of the object


class StoredPolicy:
    """The policy of one database. `current` is the newest that this process has seen."""

    def __init__(self, store: CasStore, database_id: bytes) -> None:
        """Start without reading: `current` is the policy of version 0."""
        self._store = store
        self._database_id = database_id
        self._is_listed = False
        self.current = Policy()

    async def refresh(self) -> Policy:
        """Read the versions after the current one, if there are any, and return the newest.

        Raises `CorruptObject` and `StoreError`.
        """
        while await self.read_next():
            pass
        return self.current

    async def read_next(self) -> bool:
        """Read the next version; return whether there is one. Raises as `refresh`.

        The first time, the folder is listed, and the next version is the highest in the list. All
        later calls send one request.
        """
        if self._is_listed:
            return await self._read(self.current.version + 1)
        is_found = await self._read(await self._highest())
        self._is_listed = True
        return is_found or await self._read(self.current.version + 1)

    async def replace(
        self, policy: Policy, check: Callable[[Policy], None] = lambda _: None
    ) -> Policy:
        """Store a policy in place of the version that it has; return it with its new version.

        Its secret is that of the present one, of which `check` raises if it must not be replaced.
        Raises `PolicyChanged` if that is another version by now, `InvalidRequest`, `CorruptObject`
        and `StoreError`. After a `StoreError`, or when this is cancelled, it is unknown whether the
        policy was stored.
        """
        check_policy(policy)
        random = self._store.runtime.random
        current = await self.refresh()
        if policy.version != current.version:
            raise _changed(policy.version, current.version)
        check(current)
        following = replace(
            policy,
            version=current.version + 1,
            secret=current.secret or random.randbytes(SECRET_BYTES),
        )
        name = policy_name(following.version)
        write_id = random.randbytes(UUID_BYTES)
        data = encode_policy(following, database_id=self._database_id, write_id=write_id)
        if len(data) > POLICY_BYTES_MAX:
            raise InvalidRequest("policy", f"has {len(data)} bytes, {POLICY_BYTES_MAX} at most")
        outcome = await self._store.claim(name, data)
        if isinstance(outcome, Taken):
            self._see(await self._decode(name, outcome.data))
            raise _changed(policy.version, following.version)
        return self._see(following)

    async def _highest(self) -> int:
        """List the versions; return the highest, or 0."""
        names = [info.name async for info in self._store.list(ACCESS_FOLDER)]
        return max((parse_policy_name(name) or 0 for name in names), default=0)

    async def _read(self, version: int) -> bool:
        """Read this version; return whether it exists."""
        name = policy_name(version)
        if version == 0:
            return False
        try:
            stored = await self._store.get(name)
        except ObjectNotFound:
            return False
        self._see(await self._decode(name, stored.data))
        return True

    async def _decode(self, name: str, data: bytes) -> Policy:
        decode = partial(decode_policy, database_id=self._database_id)
        return await self._store.runtime.workers.run(decode, name, data)

    def _see(self, policy: Policy) -> Policy:
        """Make a policy the current one, unless a newer one is; return it."""
        if policy.version > self.current.version:
            self.current = policy
        return policy


def _changed(expected: int, found: int) -> PolicyChanged:
    return PolicyChanged(
        f"the access policy has version {found} by now, not {expected}: read it again, and repeat "
        "the change"
    )


async def begin_policy(store: CasStore, database_id: bytes, policy: Policy) -> None:
    """Make the policy of another database the first of a new one, which draws its own secret.

    A second call finds it there. Raises `IllegalState` if there is another policy.
    """
    stored = StoredPolicy(store, database_id)
    try:
        found = await stored.refresh()
        if found.version == 0 and policy.version:
            found = await stored.replace(replace(policy, version=0))
    except PolicyChanged:  # another process makes the same database
        found = stored.current
    except WrongObject as error:
        raise _remains(store) from error
    if found != replace(policy, version=min(policy.version, 1), secret=found.secret):
        raise _remains(store)


def _remains(store: CasStore) -> IllegalState:
    return IllegalState(
        f"{store.url} holds an access policy in {ACCESS_FOLDER} that does not belong to the new "
        "database: empty the place, or choose another URL"
    )
