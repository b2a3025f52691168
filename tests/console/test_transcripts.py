"""Every command of `shalekv` prints what its transcript says, and ends with that exit code.

TRANSCRIPTS=update writes the actual output into the transcripts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.write.snapshots import Snapshots
from tests.console.transcript import Session
from tests.kit.processes.child import Child
from tests.kit.processes.in_process import put_at, real_runtime, running, serve_settings
from tests.kit.processes.processes import Processes

FOLDER = Path(__file__).parent / "transcripts"
ROOT = Path(__file__).parents[2]
UPDATES = os.environ.get("TRANSCRIPTS") == "update"
ALONE = ("--no-with-compactor", "--no-with-collector")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One server for all transcripts, which use different keys."""
    with Processes() as processes:
        url = f"file://{tmp_path_factory.mktemp('served')}/db"
        child = processes.start_serve(url, *ALONE)
        child.wait_until_ready()
        child.argv.append(url)
        yield child


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that is not served: a fence, and a commit for each of three keys."""
    folder = tmp_path_factory.mktemp("template") / "db"
    asyncio.run(_fill(f"file://{folder}"))
    return folder


async def _fill(url: str) -> None:
    with real_runtime() as runtime:
        store = open_store(url, runtime, StoreSettings())
        async with running(store, serve_settings(), runtime) as writer:
            for key in (b"a", b"b", b"c"):
                await put_at(writer, key, b"value of " + key)
        snapshots = Snapshots(CasStore(store, runtime, StoreSettings()))
        for view in await snapshots.list():  # it would expire while transcripts are played
            await snapshots.delete(view.snapshot.id.hex())
        await store.close()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_commands_print_what_their_transcript_says(
    path: Path, server: Child, template: Path, tmp_path: Path
) -> None:
    """Output, messages and exit codes of all commands match the transcript."""
    shutil.copytree(template, tmp_path / "db")
    variables = {
        "ADDR": server.listen,
        "NOWHERE": "127.0.0.1:1",
        "SERVED": server.argv[-1],
        "DB": f"file://{tmp_path}/db",
        "TMP": str(tmp_path),
        "ROOT": str(ROOT),
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHALEKV_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    session = Session(variables, environment | {"SHALEKV_ADDR": server.listen}, tmp_path)
    played = session.play(path.read_text())
    if UPDATES:
        path.write_text(played)
    assert not session.failures, "\n".join(session.failures)
