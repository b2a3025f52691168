"""What is not installed is named with the command that installs it; the base has all for clients.

The wheels of this working copy are unpacked beside links to the packages that they require, by what
the wheels themselves say. Nothing else of this environment can be imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shalekv.cli.commands.doctor import PROBLEMS_FOUND
from shalekv.cli.console.connection import ClientExit
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from tests.unit.distributions.conftest import Environment, install

# The commands that talk to a server, each with words that get as far as the connection.
OF_CLIENTS = {
    "access enforce": "",
    "access open": "",
    "access status": "",
    "access whoami": "",
    "add": "k",
    "admin profile": "--seconds 0.1",
    "admin slow": "",
    "admin stats": "",
    "bench": "",
    "count": "p",
    "delete": "k",
    "dump": "",
    "exists": "k",
    "get": "k",
    "grant list": "",
    "grant remove": "someone",
    "grant set": "someone --role r",
    "health": "",
    "load": "",
    "put": "k v",
    "role list": "",
    "role remove": "r",
    "role set": "r --allow read",
    "scan": "",
    "status": "",
    "top": "",
    "touch": "k --ttl 1s",
    "ttl": "k",
    "txn": "--then 'put k v'",
    "watch": "",
}
WITHOUT_SERVER = {"completion": "bash", "shell": ""}  # a shell without input ends at once
FOR_ALL = {"doctor"}  # in part, see below
# No server listens there.
NOWHERE = ("SHALEKV_ADDR", "127.0.0.1:1")
COMMANDS = f"""
import contextlib, io, json, os, shlex, sys
from shalekv.cli.main import main

os.environ.__setitem__(*{NOWHERE})
ended = {{}}
for words in sys.argv[1:]:
    sys.argv = ["shalekv", *shlex.split(words)]
    said, printed = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            main()
        except SystemExit as end:
            printed.flush()
            ended[words] = (end.code, said.getvalue(), printed.buffer.getvalue().decode())
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def base(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install shalekv`."""
    return install(wheels, tmp_path_factory.mktemp("base"), "shalekv")


@pytest.fixture(scope="module")
def server(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install 'shalekv[server]'`."""
    return install(wheels, tmp_path_factory.mktemp("server"), "shalekv", "server")


def ended(environment: Environment, *calls: str) -> dict[str, tuple[int, str]]:
    """The exit code and stderr of each of these calls of `shalekv`."""
    return {call: (code, said) for call, (code, said, _) in called(environment, *calls).items()}


def called(environment: Environment, *calls: str) -> dict[str, tuple[int, str, str]]:
    """As `ended`, with stdout."""
    return dict(json.loads(environment.run(COMMANDS, *calls)))


def commands() -> Iterator[str]:
    """All commands by their words, without those that only hold others."""
    todo: list[tuple[str, click.Command]] = [("", shalekv)]
    while todo:
        words, command = todo.pop()
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield words
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                member = command.get_command(context, name)
                assert member is not None
                todo.append((f"{words} {name}".strip(), member))


def test_the_base_has_all_for_clients(base: Environment) -> None:
    """Each command of clients gets as far as the server; each other one says what to install, in
    one line.
    """
    own = {name: f"{name} {words}".strip() for name, words in OF_CLIENTS.items()}
    others = {*commands()} - {*own, *WITHOUT_SERVER, *FOR_ALL}
    found = ended(base, *own.values(), *others, *(" ".join(c) for c in WITHOUT_SERVER.items()))
    for code, said in (found.pop(call) for call in own.values()):
        assert code in {ClientExit.UNREACHABLE, ExitCode.UNEXPECTED}, said
        assert "install" not in said
    for name in others:
        code, said = found.pop(name)
        assert (code, said.count("\n")) == (ExitCode.USAGE, 1), name
        assert said.endswith(". Install them: pip install 'shalekv[server]'\n")
    assert [code for code, _ in found.values()] == [ExitCode.OK] * len(WITHOUT_SERVER)


def test_the_base_examines_machine_and_servers(base: Environment) -> None:
    """Without what servers need, `shalekv doctor` checks all but the store, and says why."""
    call = "doctor --url s3://bucket/folder --format json"
    code, said, printed = called(base, call)[call]
    found = {(e["area"], e["check"]): e for e in map(json.loads, printed.splitlines())}
    assert code == PROBLEMS_FOUND, said  # no server listens
    assert found["machine", "libraries"]["severity"] == "ok"
    assert found["server 127.0.0.1:1", "reachable"]["severity"] == "problem"
    assert [e["evidence"] for (area, _), e in found.items() if area in {"store", "database"}] == [
        "needs pip install 'shalekv[server]'"
    ]


def test_what_a_store_or_an_elector_needs_is_named(server: Environment, tmp_path: Path) -> None:
    """Where the driver of a store or an elector is not installed, the error names its extra."""
    two_phase = "fsck --url s3://bucket/folder --cas two_phase --records-url"
    calls = {
        "fsck --url gs://bucket/folder": "gcs",
        "fsck --url az://bucket/folder": "azure",
        f"{two_phase} sqlite://{tmp_path}/records.db": "sqlite",
        f"{two_phase} mysql://user:password@host/database": "mysql",
        f"{two_phase} postgresql://user:password@host/database": "postgres",
        f"serve --create --url file://{tmp_path}/database --elect etcd://host:2379/key": "etcd",
        f"serve --create --url file://{tmp_path}/database --otlp-endpoint http://[::1]:1": "otel",
    }
    for call, (code, said) in ended(server, *calls).items():
        assert code == ExitCode.USAGE, said
        assert f"pip install 'shalekv[{calls[call]}]'" in said


def test_what_profiles_need_is_named(server: Environment) -> None:
    """A server without pyinstrument refuses a profile, and says what to install on it."""
    program = (
        "import asyncio\nfrom shalekv.errors import ProfileRefused\n"
        "from shalekv.telemetry.profile import ProfileFormat, take_profile\n"
        "try:\n    asyncio.run(take_profile(100, ProfileFormat.TEXT))\n"
        "except ProfileRefused as e:\n    print(e)"
    )
    assert "pip install 'shalekv[profile]'" in server.run(program)


def test_what_spark_needs_is_named(base: Environment) -> None:
    """Without PySpark the pipeline is imported, and its first use says what to install."""
    program = (
        "import shalekv_spark\ntry:\n    shalekv_spark.scan\nexcept ImportError as e:\n    print(e)"
    )
    assert "pip install 'shalekv[spark]'" in base.run(program)


def test_without_click_the_command_says_what_to_install(wheels: Path, tmp_path: Path) -> None:
    """`pip install --no-deps` leaves a command that ends with one line, and no traceback."""
    bare = install(wheels, tmp_path, "shalekv-client")
    said = bare.run("try:\n    import shalekv.cli.main\nexcept SystemExit as end:\n    print(end)")
    assert said == (
        "Error: click is not installed. Install ShaleKV and its packages: pip install shalekv\n"
    )
