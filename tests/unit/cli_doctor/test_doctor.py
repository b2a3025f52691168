"""`shalekv doctor` as a command: beside real servers and databases, with what goes wrong there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from shalekv.cli.commands.doctor import PROBLEMS_FOUND
from shalekv.cli.doctor import diagnosis
from shalekv.cli.doctor.bundle import Redaction
from shalekv.cli.doctor.diagnosis import Area
from shalekv.cli.main import shalekv as commands
from shalekv.clock import MachineClock
from shalekv.errors import StoreUnavailable
from shalekv.jobs.compact.run import compact_wal
from shalekv.protocol.access import Principal
from shalekv.rpc.server import Server
from shalekv.server.access.guard import Guard
from shalekv.server.access.identity import Credentials, Identity
from shalekv.settings import CompactorConfig, StoreSettings, TlsSettings
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.in_process import put_at, real_runtime, running, serve_settings
from tests.kit.serving.guarded import HeldPolicy, KnownTokens, policy_of

SECRET = "SENTINEL-do-not-show"
TOKEN = f"{SECRET}-token"


async def run(*args: str, env: Mapping[str, str] | None = None) -> Result:
    """Run the command in a thread, without settings of the machine's own."""
    clean: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith("SHALEKV_")
    }
    runner = CliRunner(env={**clean, **(env or {})})
    return await asyncio.to_thread(runner.invoke, commands, ["doctor", *args])


def found_in(result: Result) -> dict[tuple[str, str], tuple[str, str]]:
    """Severity and evidence by area and check, of the JSON that was printed."""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {
        (each["area"].partition(" ")[0], each["check"]): (each["severity"], each["evidence"])
        for each in lines
    }


@dataclass(frozen=True)
class Site:
    """A database in a folder, and a server of it that speaks TLS and asks who calls."""

    url: str
    address: str
    folder: Path

    @property
    def flags(self) -> list[str]:
        return [
            *("--url", self.url, "--addr", self.address, "--timeout-ms", "60000"),
            *("--tls-ca", str(self.folder / "ca.crt")),
            *("--token-file", str(self.folder / "token")),
        ]


class _OneToken(KnownTokens):
    """One token, of `root`: its text is not the name of the principal."""

    def identify(self, credentials: Credentials) -> Identity:
        found = super().identify(credentials)
        return replace(found, principal=Principal("token:root")) if found.proof else found


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site with keys, in the WAL and in the levels; its certificate ends in three days."""
    authority = Authority()
    authority.write(tmp_path)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    files = authority.issue(*LOCAL, valid=(-1, 3)).write(tmp_path, "server")
    tls = TlsSettings(tls_cert=files.certificate, tls_key=files.key)
    settings, url = serve_settings(), f"file://{tmp_path}/db"
    guard = Guard(_OneToken(TOKEN), HeldPolicy(policy_of()))
    with real_runtime() as loop_runtime:
        runtime = replace(loop_runtime, clock=MachineClock())  # it knows the time of day
        store = open_store(url, runtime, StoreSettings())
        server = Server(settings.server, runtime, guard=guard, tls=tls)
        try:
            async with running(store, settings, runtime) as writer:
                for part in (b"-a", b"-b"):
                    await put_at(writer, SECRET.encode() + part, SECRET.encode())
                    cas = CasStore(store, runtime, StoreSettings())
                    if part == b"-a":
                        await compact_wal(cas, CompactorConfig(), holder="test")
                await server.start(writer.kv, writer.admin, writer.watches)
                yield Site(url, server.listen, tmp_path)
                await server.stop()
        finally:
            await server.stop()
            await store.close()


async def test_a_machine_alone_is_checked() -> None:
    """Without flags the machine is checked, and the rest is named as not checked."""
    result = await run("--format", "json")
    found = found_in(result)
    assert found["machine", "libraries"][0] == "ok"
    assert found["store", "store"][0] == "not checked"
    assert {area for area, _ in found} == {"machine", "store"}
    assert result.exit_code in (0, PROBLEMS_FOUND)  # of a disk that is full, for example


async def test_a_database_and_its_server_are_checked(site: Site) -> None:
    """Nothing is wrong with a served database but its certificate, which ends soon."""
    result = await run(*site.flags, "--format", "json")
    found = found_in(result)
    assert [at for at, (severity, _) in found.items() if severity == "problem"] == []
    assert found["server", "server certificate"][0] == "warning"
    assert found["server", "credentials"][1].startswith("accepted: token:")
    assert found["server", "database"][0] == "ok"
    assert found["server", "clock"][0] == "ok"
    assert found["database", "manifest"][0] == "ok"
    assert "read after delete" in found["store", "permissions"][1]
    assert list((site.folder / "db" / "verify").iterdir()) == []
    assert f"{site.url}/verify/" in result.stderr
    assert re.search(r"0 problems, \d+ warnings?, \d+ checks passed", result.stderr)


async def test_read_only_creates_nothing(site: Site) -> None:
    """With --read-only no file is created, and what needs a write is not checked."""
    folders = [site.folder / "db", site.folder / "db" / "verify"]
    before = [(path, path.stat().st_mtime_ns) for path in folders]
    result = await run(*site.flags, "--read-only", "--format", "json")
    assert before == [(path, path.stat().st_mtime_ns) for path in folders]
    found = found_in(result)
    assert found["store", "writes"][0] == "not checked"
    assert found["store", "clock"][0] == "not checked"
    assert "Writing" not in result.stderr


async def test_another_database_and_a_refused_token_are_problems(
    site: Site, tmp_path: Path
) -> None:
    """A server of another database is found out; one that refuses the caller says so."""
    with real_runtime(seed=2) as runtime:
        store = open_store(f"file://{tmp_path}/other", runtime, StoreSettings())
        async with running(store, serve_settings(), runtime):
            pass
        await store.close()
    flags = [each.replace(site.url, f"file://{tmp_path}/other") for each in site.flags]
    result = await run(*flags, "--format", "json")
    assert result.exit_code == PROBLEMS_FOUND
    assert found_in(result)["server", "database"][0] == "problem"
    (tmp_path / "token").write_text("unknown\n")
    refused = found_in(await run(*site.flags, "--format", "json"))
    assert refused["server", "credentials"][0] == "problem"


async def test_wrong_settings_are_found_and_do_not_end_it(tmp_path: Path) -> None:
    """A misspelt variable and a broken file are problems; the machine is checked all the same."""
    broken = tmp_path / "broken.toml"
    broken.write_text("[writer\n")
    for env, text in (
        ({"SHALEKV_WRITER__FLUSH_BYTE": "3"}, "did you mean SHALEKV_WRITER__FLUSH_BYTES?"),
        ({"SHALEKV_CONFIG": str(broken)}, "is not TOML"),
        ({"SHALEKV_CONFIG": str(tmp_path / "none")}, "No such file"),
        ({"SHALEKV_WRITER__FLUSH_BYTES": "many"}, "SHALEKV_WRITER__FLUSH_BYTES"),
    ):
        result = await run("--url", f"file://{tmp_path}/db", "--format", "json", env=env)
        found = found_in(result)
        assert (result.exit_code, found["machine", "settings"][0]) == (PROBLEMS_FOUND, "problem")
        assert text in found["machine", "settings"][1]
        assert found["store", "store"][0] == "not checked"
        assert found["machine", "python"][0] == "ok"
    assert not (tmp_path / "db").exists()


async def test_a_check_never_ends_the_others() -> None:
    """A check that is slow, refused or wrong is not checked, with the reason, but no secret."""
    area = Area("store")

    async def slow() -> list[object]:
        await asyncio.Event().wait()
        return []

    def failing(error: Exception) -> diagnosis.Work:
        async def work() -> list[object]:
            raise error

        return work  # type: ignore[return-value] # it never returns

    cases: dict[str, diagnosis.Work] = {
        "no answer within 1 ms": slow,  # type: ignore[dict-item] # as above
        "down": failing(StoreUnavailable("s3://b", "get", "n", "down")),
        "No space left": failing(OSError(28, "No space left")),
        "the check itself failed: KeyError": failing(KeyError(SECRET)),
    }
    for reason, work in cases.items():
        (found,) = await diagnosis.checked(area, "c", work, 1)
        assert found.severity.value == "not checked"
        assert reason in found.evidence
        assert SECRET not in found.evidence


async def test_missing_credentials_are_one_problem(tmp_path: Path) -> None:
    """Without credentials, that is the problem; what depends on them is not checked."""
    none = str(tmp_path / "none")
    env = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"), "")
    env |= {"AWS_CONFIG_FILE": none, "AWS_SHARED_CREDENTIALS_FILE": none}
    env |= {"AWS_EC2_METADATA_DISABLED": "true"}
    result = await run("--url", "s3://bucket/db", "--format", "json", env=env)
    found = found_in(result)
    stored = {at: severity for at, (severity, _) in found.items() if at[0] != "machine"}
    assert stored.pop(("store", "credentials")) == "problem"
    assert set(stored.values()) == {"not checked"}
    assert "no credentials" in found["database", "database"][1]


async def test_who_does_not_answer_is_a_problem() -> None:
    """A store, or a server, that accepts connections and says nothing is no healthy one."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        address = "{}:{}".format(*listening.sockets[0].getsockname())
        store = ("--url", "s3://bucket/db", "--endpoint-url", f"http://{address}", "--anonymous")
        result = await run(*store, "--addr", address, "--timeout-ms", "50", "--format", "json")
        for writer in writers:
            writer.close()
    found = found_in(result)
    assert result.exit_code == PROBLEMS_FOUND
    assert found["store", "permissions"][0] == "problem"
    assert found["server", "reachable"][0] == "problem"


SECRETS_ENV = {
    "AWS_ACCESS_KEY_ID": f"{SECRET}-id",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}-key",
    "AWS_SESSION_TOKEN": f"{SECRET}-session",
    "AZURE_STORAGE_SAS_TOKEN": f"sig={SECRET}",
    "SHALEKV_TOKEN": TOKEN,
    "SOME_PASSWORD": f"{SECRET}-other",
    "HTTPS_PROXY": f"http://user:{SECRET}@127.0.0.1:1/?key={SECRET}",
    "NO_PROXY": "127.0.0.1",
}


def unpacked(bundle: Path) -> bytes:
    """All bytes of the files of a bundle, with their names."""
    if bundle.suffix == ".zip":
        with zipfile.ZipFile(bundle) as archive:
            return b"".join(name.encode() + archive.read(name) for name in archive.namelist())
    with tarfile.open(bundle) as archive:
        files = ((each.name, archive.extractfile(each)) for each in archive.getmembers())
        return b"".join(name.encode() + file.read() for name, file in files if file)


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
async def test_a_bundle_has_no_secret(site: Site, suffix: str) -> None:
    """Keys, values, tokens and credentials are not in a bundle, which its owner alone reads."""
    bundle = site.folder / f"report{suffix}"
    result = await run(*site.flags, "--bundle", str(bundle), env=SECRETS_ENV)
    assert result.exit_code == 0, result.output
    data = unpacked(bundle)
    for part in (b"manifest.json", b"server-0-status.json", b"findings.jsonl", b"versions.json"):
        assert part in data
    assert b'"levels": [\n' in data
    assert SECRET.encode() not in data
    assert SECRET.encode().hex().encode() not in data
    assert SECRET not in result.output
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600


async def test_a_bundle_has_no_secret_of_settings(tmp_path: Path) -> None:
    """The password of the records is in no file, wherever it was set, and what failed is."""
    config = tmp_path / "settings.toml"
    place = f"mysql://user:{SECRET}@127.0.0.1:1/db"
    config.write_text(f'[store]\nrecords_url = "{place}"\nendpoint_url = "http://127.0.0.1:1"\n')
    for number, env in enumerate(
        (
            {"SHALEKV_CONFIG": str(config)},
            {"SHALEKV_STORE__RECORDS_URL": place, "SHALEKV_STORE__ENDPOINT_URL": "http://[::1]:1"},
            {"SHALEKV_STORE__ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:1"},
        )
    ):
        bundle = tmp_path / f"{number}.zip"
        result = await run(
            "--url", "s3://bucket/db", "--bundle", str(bundle), env=SECRETS_ENV | env
        )
        assert result.exit_code == PROBLEMS_FOUND, result.output
        data = unpacked(bundle)
        assert b"endpoint_url" in data
        assert SECRET.encode() not in data
        assert SECRET not in result.output


async def test_a_bundle_replaces_nothing(tmp_path: Path) -> None:
    """A file that exists, or that is a link, is refused before anything is checked."""
    there, link = tmp_path / "there.zip", tmp_path / "link.zip"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere.zip")
    for path in (there, link, tmp_path / "report.txt"):
        result = await run("--bundle", str(path))
        assert (result.exit_code, result.stdout) == (2, "")
    assert there.read_text() == "mine"
    assert not (tmp_path / "elsewhere.zip").exists()


def test_what_a_url_may_hide_is_masked() -> None:
    """Users and queries of URLs, headers of credentials, and known secrets are masked."""
    redaction = Redaction(["s3cr3t-value", "short", 'quo"ted-secret', 'qu\xf6"ted'])
    text = (
        "s3cr3t-value short postgresql://me:p@w@host:1/db?password=x#y "
        '"quo\\"ted-secret" "qu\xf6\\"ted" Authorization: Bearer abc.def-123'
    )
    assert redaction.clean(text) == (
        '*** short postgresql://***@host:1/db?*** "***" "***" Authorization: Bearer ***'
    )
