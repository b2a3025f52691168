"""The examples of clients/python/README.md, in order, against one server.

The page's own fixture starts that server, as an application's tests would, and the page's own test
runs. The other examples are typed into one namespace, as into `python -m asyncio`, and must print
what the page shows. Addresses of the page are those of this test's servers.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from opentelemetry import trace

from shalekv.rpc.server import Server
from shalekv.settings import TlsSettings
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.processes import SHALEKV, Processes
from tests.kit.processes.readme import BLOCK, ROOT
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches
from tests.kit.serving.rpc import runtime, server_settings

PAGE = (ROOT / "clients/python/README.md").read_text(encoding="utf-8")
WRITER, READER, SECURED = "127.0.0.1:7654", "127.0.0.1:7656", "127.0.0.1:7657"


def blocks() -> Iterator[tuple[str, str]]:
    """The blocks of Python, each with the output that the page shows behind it."""
    found = BLOCK.findall(PAGE)
    for (language, code), (following, shown) in pairwise([*found, ("", "")]):
        if language == "python":
            yield code, shown if following == "text" else ""


def is_of_applications(code: str) -> bool:
    """Return whether the block is a part of the tests of an application."""
    return code.startswith(("# conftest.py\n", "# a test\n"))


EXAMPLES = [(code, shown) for code, shown in blocks() if not is_of_applications(code)]
OF_APPLICATIONS = "".join(code for code, _ in blocks() if is_of_applications(code))


@pytest.fixture(scope="session", autouse=True)
def _on_the_path() -> Iterator[None]:
    """The page's fixture starts `shalekv` by its name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(Path(SHALEKV).parent), prepend=":")
        yield


# Defines the fixture `database`, and a test.
exec(compile(OF_APPLICATIONS, "clients/python/README.md", "exec"))  # noqa: S102 (our own page)


async def type_in(code: str, names: dict[str, Any]) -> None:
    """Run an example as `python -m asyncio` would."""
    typed = compile(code, code, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = FunctionType(typed, names)()
    if inspect.iscoroutine(running):
        await running


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[Server]:
    """A server with TLS, and in `folder` the files of its clients that the page names."""
    authority = Authority()
    (folder / "tls").mkdir()
    authority.write(folder / "tls")
    (folder / "shop.token").write_text("token")
    files = authority.issue(*LOCAL).write(folder, "server")
    tls = TlsSettings(tls_cert=files.certificate, tls_key=files.key)
    server = Server(server_settings(), runtime(), tls=tls)
    await server.start(MemoryKv(), MemoryAdmin(), MemoryWatches())
    try:
        yield server
    finally:
        await server.stop()


async def test_examples_print_what_the_page_shows(
    database: str,
    processes: Processes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every example runs, in the order of the page, and prints what is shown below it."""
    monkeypatch.chdir(tmp_path)
    # A provider can be set once, for the whole process: that of the page must not outlive it.
    monkeypatch.setattr(trace, "set_tracer_provider", lambda _: None)
    url = f"file://{Path(database.removeprefix('unix:')).parent}/db"
    reader = await processes.read(url)
    names: dict[str, Any] = {}
    async with secured(tmp_path) as server:
        addresses = {WRITER: database, READER: reader.listen, SECURED: server.listen}
        for code, shown in EXAMPLES:
            for told, real in addresses.items():
                code = code.replace(told, real)  # noqa: PLW2901 (the same example)
            await type_in(code, names)
            assert capsys.readouterr().out == shown, code
        await names["client"].close()
        names["provider"].shutdown()
