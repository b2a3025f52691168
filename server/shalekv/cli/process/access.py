"""Access control of a process: who calls, the policy, quotas, and the audit log.

The parts live as long as the process, also while it stands by. The policy is read when a database
was found, before the first call is answered: a successor of the writer enforces it from its first
call on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from shalekv.errors import CorruptObject, DatabaseError, StoreError
from shalekv.runtime import Runtime
from shalekv.server.access.audit import AuditLog
from shalekv.server.access.authenticator import Authenticator
from shalekv.server.access.guard import Guard
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.access.quotas import Quotas
from shalekv.settings import ReaderConfig, WriterConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore

LOAD_RETRY_MS = 10_000  # between two looks for a database on standby


class ProcessAccess:
    """The guard of a process, and what it is made of."""

    def __init__(
        self,
        settings: WriterConfig | ReaderConfig,
        store: ObjectStore,
        runtime: Runtime,
        audit: AuditLog | None,
    ) -> None:
        """Read the files of the settings. Raises `InvalidSetting`."""
        access, now_ms = settings.access, runtime.clock.monotonic_ms
        self.policies = AccessPolicies(
            CasStore(store, runtime, settings.store),
            access,
            knows_callers=access.names_callers or bool(settings.tls.tls_client_ca),
        )
        self._clock = runtime.clock
        self._authenticator = Authenticator(access, runtime)
        self._is_loaded = asyncio.Event()
        self.guard = Guard(
            self._authenticator,
            self.policies,
            quotas=Quotas(now_ms, settings.server.message_bytes_max),
            audit=audit,
        )

    async def load(self) -> None:
        """Read the newest policy; from now on it is followed. Raises as `AccessPolicies.refresh`.

        REQUIRES: there is a database.
        """
        await self.policies.refresh()
        self._is_loaded.set()

    async def load_early(self) -> None:
        """Read the policy as soon as that is possible: until then nobody is shown anything.

        A process on standby, which answers scrapes, may wait for its database for long.
        """
        while not self._is_loaded.is_set():
            try:
                await self.load()
            except (DatabaseError, StoreError, CorruptObject):  # what opens it will say so
                await self._clock.sleep_ms(LOAD_RETRY_MS)

    async def run(self) -> None:
        """Follow the policy and what identities are proven by, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._authenticator.run(), name="identities")
            tasks.create_task(self.guard.run(), name="guard")
            await self._is_loaded.wait()
            tasks.create_task(self.policies.run(), name="access policy")


@asynccontextmanager
async def open_access(
    settings: WriterConfig | ReaderConfig,
    store: ObjectStore,
    runtime: Runtime,
    audit: AuditLog | None,
) -> AsyncIterator[ProcessAccess]:
    """Access control as the settings say. Raises `InvalidSetting`."""
    access = ProcessAccess(settings, store, runtime, audit)
    async with running_beside(access.run()):
        yield access


@asynccontextmanager
async def running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in a task while entered. Raises the error of the block as it is, in no group."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, after the task has ended
            failure = error
        finally:
            task.cancel()
    if failure is not None:
        raise failure
