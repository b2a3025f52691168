"""Where a golden database is written, and how its objects are copied from there."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.opening import open_store
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.processes.in_process import real_runtime
from tests.servers.s3 import S3Server
from tests.servers.versitygw import versitygw

RECORDS_FILE = "records.json"
PARENT_FOLDER = "parent"
BUCKET = "golden"


class Place(ABC):
    """A database that is being made."""

    url: str
    env: Mapping[str, str]  # of the processes that make it

    @abstractmethod
    async def copy_to(self, target: Path) -> None:
        """Write every object, and what belongs to them, into a folder that is there."""


class FolderPlace(Place):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"
        self.env = {}
        self._folder = folder

    async def copy_to(self, target: Path) -> None:
        """As the interface says."""
        for path in sorted(self._folder.glob("*/*")):
            write(target, str(path.relative_to(self._folder)), path.read_bytes())


class ClonePlace(FolderPlace):
    """A folder that a clone is made in, and its parent in another one."""

    def __init__(self, scratch: Path) -> None:
        """First it is the parent that is made."""
        super().__init__(scratch / "clone")
        self.clone_url = self.url
        self._parent = FolderPlace(scratch / PARENT_FOLDER)
        self.url = self._parent.url

    async def copy_to(self, target: Path) -> None:
        """As the interface says; the parent goes into a folder below."""
        await super().copy_to(target)
        (target / PARENT_FOLDER).mkdir()
        await self._parent.copy_to(target / PARENT_FOLDER)


class TwoPhasePlace(Place):
    """A bucket, and records in a file."""

    def __init__(self, server: S3Server, scratch: Path) -> None:
        self.url = f"s3://{BUCKET}/database"
        self._settings = StoreSettings(
            endpoint_url=server.endpoint,
            cas=CasChoice.TWO_PHASE,
            records_url=f"sqlite://{scratch}/records.db",
        )
        self.env = server.environment | {
            "SHALEKV_STORE__ENDPOINT_URL": self._settings.endpoint_url,
            "SHALEKV_STORE__CAS": self._settings.cas,
            "SHALEKV_STORE__RECORDS_URL": self._settings.records_url,
        }

    async def copy_to(self, target: Path) -> None:
        """As the interface says."""
        with real_runtime() as runtime:
            store = open_store(self.url, runtime, self._settings)
            assert isinstance(store, TwoPhaseStore)
            for folder in (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER):
                async for info in store.list(folder):
                    write(target, info.name, (await store.get(info.name)).data)
            records = [
                [record.destination.name, record.source, record.is_committed]
                async for record in store.records.list(self.url, uncommitted_only=False)
            ]
            await store.close()
        (target / RECORDS_FILE).write_text(json.dumps(records, indent=1) + "\n", "ascii")


@asynccontextmanager
async def place(scratch: Path, *, is_two_phase: bool, is_clone: bool) -> AsyncIterator[Place]:
    """Where the next database is made."""
    if is_clone:
        yield ClonePlace(scratch)
        return
    if not is_two_phase:
        yield FolderPlace(scratch / "database")
        return
    with versitygw() as server:
        server.create_bucket(BUCKET)
        os.environ.update(server.environment)  # this process reads the bucket, too
        yield TwoPhasePlace(server, scratch)


def write(target: Path, name: str, data: bytes) -> None:
    """Write the copy of an object."""
    copy = target / name
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(data)
