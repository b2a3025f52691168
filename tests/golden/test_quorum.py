"""A quorum database and its safekeepers, as an earlier version left them, are opened and read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shalekv.core.quorum.membership import Member
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.member_files import CONTROL_BYTES, decode_control, encode_control
from shalekv_client import Client
from tests.golden.databases import DATABASES
from tests.golden.make_quorum import DATABASE, DESCRIPTION, MEMBERS, SAFEKEEPER, SMALL
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster

FOLDERS = sorted(path.parent for path in DATABASES.glob(f"*/{DESCRIPTION}"))


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes for a test and ends them with it."""
    with Processes() as started:
        yield started


def test_there_are_golden_quorum_databases() -> None:
    """The test below has something to read."""
    assert [folder.name for folder in FOLDERS] == ["v0_7_quorum"]


def restored(folder: Path, cluster: Cluster) -> None:
    """Copy bucket and logs; the bucket and the members are at other places than they were."""
    bucket = Path(cluster.url.removeprefix("file://"))
    shutil.copytree(folder / DATABASE, bucket)
    for path in (bucket / "manifest").glob("*.manifest"):
        name = f"manifest/{path.name}"
        manifest = decode_manifest(name, path.read_bytes())
        members = map(Member.parse, manifest.wal_members)
        moved = [
            str(member._replace(address=address))
            for member, address in zip(members, cluster.addresses, strict=True)
        ]
        path.write_bytes(encode_manifest(replace(manifest, wal_members=tuple(moved))))
    for number in range(MEMBERS):
        shutil.copytree(folder / SAFEKEEPER.format(number), cluster.data(number))
        for path in cluster.data(number).glob("*/control"):
            path.write_bytes(moved_control(path.read_bytes(), cluster.url))


def moved_control(data: bytes, url: str) -> bytes:
    """A control file whose archive is at another URL; of its slots some may be empty."""
    slots = [data[at : at + CONTROL_BYTES] for at in range(0, len(data), CONTROL_BYTES)]
    return b"".join(_moved_slot(slot, url) if any(slot) else slot for slot in slots)


def _moved_slot(slot: bytes, url: str) -> bytes:
    control = decode_control("control", slot)
    return encode_control(replace(control, identity=replace(control.identity, url=url)))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
async def test_a_golden_quorum_database_is_opened(
    folder: Path, processes: Processes, tmp_path: Path
) -> None:
    """What was archived is there, and what only the safekeepers have; and it is written to."""
    cluster = Cluster(processes, tmp_path, count=MEMBERS)
    restored(folder, cluster)
    archived = len([*(Path(cluster.url.removeprefix("file://")) / "wal").iterdir()])
    await cluster.start(*SMALL)
    writer = await cluster.serve(create=False)
    described: Any = json.loads((folder / DESCRIPTION).read_text("ascii"))["entries"]
    async with Client(writer.listen) as client:
        found = [[e.key.decode(), e.value.decode(), e.seq] async for e in client.scan()]
        assert found == described
        await client.put(b"and", b"more")
    assert await writer.stop() == 0, writer.report()
    status = await cluster.run("safekeeper", "status", "--format", "json")
    told = [json.loads(line) for line in status.stdout().splitlines()]
    assert all(each["health"] == "sound" for each in told)
    assert all(each["last_lsn"] > archived for each in told)
    fsck = await cluster.run("fsck", "--deep")
    assert await fsck.exited() == 0, fsck.report()
