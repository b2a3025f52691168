"""Commands and a server with TLS and an access policy: how they are told, and what they advise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from shalekv.cli.main import shalekv
from shalekv.protocol.access import Verb
from shalekv.rpc.server import Server
from shalekv.server.access.guard import Guard
from shalekv.settings import TlsSettings
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.in_process import memory_store, real_runtime, running, serve_settings
from tests.kit.serving.guarded import HeldPolicy, KnownTokens, policy_of, prefix

CA, OTHER = Authority(), Authority("another")
PAIR = CA.issue(*LOCAL)
TOKEN, FEW, WRONG = "root", "few", "an-unknown-secret"
POLICY = policy_of(few=prefix(b"few/", Verb.READ, Verb.WRITE))
Invoke: TypeAlias = Callable[..., Awaitable[Result]]


@dataclass(frozen=True)
class Secured:
    """A writer, and files for its clients."""

    address: str
    folder: Path

    @property
    def flags(self) -> list[str]:
        return ["--tls-ca", str(self.folder / "ca.crt"), "--token-file", str(self.folder / "token")]

    async def run(
        self, *args: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> Result:
        """Run a command in a thread: the server is in the loop of the test."""
        variables = {"SHALEKV_ADDR": self.address, **(env or {})}
        runner = CliRunner(env=variables)
        return await asyncio.to_thread(runner.invoke, shalekv, args, input=stdin)


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    """A real writer that speaks TLS alone, and asks who calls."""
    CA.write(tmp_path)
    OTHER.write(tmp_path, "other")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    files = PAIR.write(tmp_path, "server")
    tls = TlsSettings(tls_cert=files.certificate, tls_key=files.key)
    settings = serve_settings()
    guard = Guard(KnownTokens(TOKEN, FEW), HeldPolicy(POLICY))
    with real_runtime() as runtime:
        server = Server(settings.server, runtime, guard=guard, tls=tls)
        try:
            async with running(memory_store(), settings, runtime) as writer:
                await server.start(writer.kv, writer.admin, writer.watches)
                yield Secured(server.listen, tmp_path)
                await server.stop()
        finally:
            await server.stop()


@pytest.mark.parametrize(
    "command",
    [
        "put k v",
        "get k --format json",
        "scan",
        "add hits",
        "dump",
        "load -",
        "bench get --count 20 --clients 2 --keys 5 --value-bytes 10",
        "status",
        "top --once --interval 100ms",
        "admin stats",
        "health",
        "grant list",
        "access whoami",
        "delete k",
    ],
)
async def test_every_command_speaks_tls_and_shows_the_token(secured: Secured, command: str) -> None:
    """By the flags that all commands have."""
    put = await secured.run("put", "k", "v", *secured.flags)
    assert put.exit_code == 0, put.output
    result = await secured.run(*command.split(), *secured.flags, stdin=b"a\tb\n")
    assert result.exit_code == 0, result.output


async def test_flags_come_before_variables_and_those_before_the_file(secured: Secured) -> None:
    """Each of them is enough; SHALEKV_TOKEN has the token itself."""
    file = secured.folder / "shalekv.toml"
    (secured.folder / "wrong").write_text(WRONG)
    own = f'tls_ca = "{secured.folder}/ca.crt"\ntoken_file = "{secured.folder}/'
    variables = {"SHALEKV_TLS_CA": str(secured.folder / "ca.crt"), "SHALEKV_TOKEN": TOKEN}
    with_file = {"SHALEKV_CONFIG": str(file)}

    async def code(*flags: str, env: Mapping[str, str]) -> int:
        return (await secured.run("put", "k", "v", *flags, env=env)).exit_code

    file.write_text(f'[client]\n{own}token"\n')
    assert await code(env=with_file) == 0
    file.write_text(f'[client]\n{own}wrong"\n')
    assert await code(env=with_file) == 14
    assert await code(env=with_file | variables) == 0
    assert await code(*secured.flags, env=with_file) == 0
    assert await code(*secured.flags, env=variables | {"SHALEKV_TOKEN": WRONG}) == 0
    file.write_text('[client]\ntoken = "x"\n')
    result = await secured.run("get", "k", env=with_file)
    assert (result.exit_code, "no setting client.token " in result.output) == (2, True)


@pytest.mark.parametrize(
    ("flags", "env", "code", "words"),
    [
        ("", {}, 9, "Give --tls-ca"),
        ("--tls-ca other.crt", {}, 9, "the authority of the server by --tls-ca"),
        ("--tls-ca system", {}, 9, "the authority of the server by --tls-ca"),
        ("--tls-ca ca.crt", {}, 14, "Give a token by --token-file or SHALEKV_TOKEN"),
        ("--tls-ca ca.crt", {"SHALEKV_TOKEN": WRONG}, 14, "get a new one"),
        ("--tls-ca ca.crt", {"SHALEKV_TOKEN": FEW}, 14, "`shalekv grant set`"),
        ("--tls-ca ca.crt --token-file none", {}, 2, "does not exist"),
        ("--tls-ca none", {}, 2, "No such file"),
        ("--tls-cert server.crt", {}, 2, "belong together"),
        ("--addr 192.0.2.1:1", {"SHALEKV_TOKEN": TOKEN}, 2, "not sent without TLS"),
        ("--tls-ca ca.crt", {"SHALEKV_TOKEN": "two words"}, 2, "visible ASCII"),
    ],
)
async def test_refusals_come_with_advice(
    secured: Secured,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    env: Mapping[str, str],
    code: int,
    words: str,
) -> None:
    """The exit code says whether it is the connection, the caller, or the command line."""
    monkeypatch.chdir(secured.folder)
    result = await secured.run("put", "k", "v", *flags.split(), env=env)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert words in result.stderr
    assert WRONG not in result.output


async def test_a_server_without_tls_is_no_place_for_it(secured: Secured) -> None:
    """Health checks say what is wrong, too."""
    result = await secured.run("health")
    assert result.exit_code == 1
    assert "speaks TLS" in result.stderr


def test_a_token_is_no_argument() -> None:
    """No command has an option whose value is an access token: `ps` shows arguments."""
    result = CliRunner().invoke(shalekv, ["put", "--help"])
    assert "--token-file" in result.output
    assert "--token " not in result.output
