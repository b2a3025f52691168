"""`shalekv shell`: its language, its verbs at a real server, its prompt and its history."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from shalekv.cli.commands.shell import run_lines
from shalekv.cli.console.connection import Target
from shalekv.cli.console.failures import FAIL_FAST
from shalekv.cli.shell.language import LanguageError, quoted, split
from shalekv.cli.shell.prompt import HISTORY_LINES_MAX, LineHistory, VerbCompleter, converse
from shalekv.cli.shell.verbs import ALIASES, KINDRED, VERBS, Shell, verb_of
from shalekv_client import Client
from tests.kit.processes.in_process import Served, memory_store, serving

TOKEN = "shalekv_0123456789ab_" + "x" * 49
WEB_TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """A server of a database in memory."""
    async with serving(memory_store()) as running:
        yield running


@pytest_asyncio.fixture
async def shell(served: Served) -> AsyncIterator[Shell]:
    """A shell of that server."""
    target = Target((served.listen,), timeout_ms=10_000)
    async with target.client(retry=FAIL_FAST) as client:
        yield Shell(client, target)


def data_of(line: str) -> list[bytes]:
    return [word.data for word in split(line)]


@given(st.lists(st.binary(max_size=20), max_size=4))
@example([b"", b"--limit", b"#", b"a b", b"\"'\\ \n\xff", "\N{NO-BREAK SPACE}".encode()])
def test_what_is_quoted_is_read_again(words: list[bytes]) -> None:
    """Any bytes can be typed, as completion writes them."""
    line = " ".join(map(quoted, words))
    assert data_of(line) == words
    assert not any(word.is_bare and word.data.startswith(b"--") for word in split(line))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("set a b", [b"set", b"a", b"b"]),
        (r"get row\x00\x01\n", [b"get", b"row\x00\x01\n"]),
        (r"""set 'a\x00' "it's \"so\"" """, [b"set", b"a\\x00", b'it\'s "so"']),
        (r"get a\ b", [b"get", b"a b"]),
        ("""get a'b c'"d" """, [b"get", b"ab cd"]),
        ("  \t ", []),
    ],
)
def test_lines_are_split_into_words(line: str, words: list[bytes]) -> None:
    """Quotes preserve blanks; escapes are parsed except between single quotes."""
    assert data_of(line) == words


@pytest.mark.parametrize("line", ["get 'a", 'get "a', r"get a\q", "get a\\", r"get \xff\x"])
def test_lines_that_are_not_whole_are_refused(line: str) -> None:
    """An open quote, and a backslash without an escape, are errors."""
    with pytest.raises(LanguageError):
        split(line)


def test_names_of_other_databases_are_known() -> None:
    """A name is a verb, stands for one, or has advice; a misspelt one has the nearest verb."""
    assert set(ALIASES.values()) <= set(VERBS)
    assert not set(ALIASES) & set(VERBS)
    assert not set(KINDRED) & (set(VERBS) | set(ALIASES))
    assert verb_of("PUT") is VERBS["set"]
    for name, advice in [("gte", "get"), ("hget", "get KEY"), ("decr", "incr KEY -1")]:
        with pytest.raises(LanguageError, match=f"no verb {name}. Did you mean: {advice}"):
            verb_of(name)
    with pytest.raises(LanguageError, match="`help` lists the verbs"):
        verb_of("xyzzy")


def test_every_verb_explains_itself() -> None:
    """The usage of a verb has its options, and its name is in the help of the command."""
    for name, verb in VERBS.items():
        assert verb.usage.split()[0] == name
        assert verb.summary.endswith(".")
    assert VERBS["set"].form.flags == {"--if-absent", "--if-present"}
    assert VERBS["set"].form.options == {"--ttl"}
    assert VERBS["keys"].form.options == {"--prefix", "--start", "--end", "--limit"}


async def test_a_failure_ends_neither_shell_nor_connection(
    shell: Shell, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors are told in plain words, with the exit code of a command, and the next line runs."""
    assert await shell.run("set text t") == 0
    assert await shell.run("incr text") == 2
    assert await shell.run("get nope") == 1
    assert await shell.run("expire nope 1h") == 1
    assert await shell.run("set text t --if-absent") == 13
    assert await shell.run("set text") == 2
    capsys.readouterr()
    await served.server.stop()
    assert await shell.run("get text") == 9
    said = capsys.readouterr()
    assert said.out == ""
    assert "Is a server running there?" in said.err


async def test_a_line_after_a_restart_connects_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The shell outlives its server."""
    store = memory_store()
    async with serving(store) as first:
        target = Target((first.listen,), timeout_ms=10_000)
        async with target.client(retry=FAIL_FAST) as client:
            shell = Shell(client, target)
            assert await shell.run("set a 1") == 0
            await first.server.stop()
            async with serving(store, server={"listen": first.listen}):
                assert await shell.run("get a") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1"


async def test_completion_has_verbs_and_keys(shell: Shell) -> None:
    """Verbs are completed by their names, other words by the keys that begin so."""
    for key in (b"kiwi", b"ki wi", b"plum"):
        await shell.client.put(key, b"")
    completer = VerbCompleter(shell)

    async def completed(text: str) -> list[tuple[str, int]]:
        found = completer.get_completions_async(Document(text), CompleteEvent())
        return [(each.text, each.start_position) async for each in found]

    assert await completed("ex") == [("exists", -2), ("expire", -2), ("exit", -2)]
    assert await completed("get ki") == [('"ki wi"', -2), ("kiwi", -2)]
    assert await completed('get "ki w') == [('"ki wi"', -5)]
    assert len(await completed("del plum ")) == 3
    assert len(await completed("")) == len(VERBS)
    assert await completed("status ki") == await completed("nope ki") == []
    assert await completed("get 'x\\") == await completed("get a\\q") == []


async def test_a_terminal_is_read_until_its_end(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines run until Ctrl-D; Ctrl-C takes back what is typed; what may be kept is in the history.

    The next shell has it; its file is for its owner alone.
    """
    history = tmp_path / "state" / "history"

    def work(typed: str, path: Path | None) -> None:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(typed)
            with asyncio.Runner() as runner:
                target = Target((served.listen,), timeout_ms=10_000)
                client = runner.run(_opened(target))
                converse(Shell(client, target), runner, path)
                runner.run(client.aclose())

    hidden = f" set hidden 1\rauth hunter2\rset token {TOKEN}\rset web {WEB_TOKEN}\r"
    lines = "set kiwi green\rget kiwi\x03get ki\x03count\r"
    await asyncio.to_thread(work, f"{hidden}{lines}\x04", history)
    said = capsys.readouterr()
    assert said.out.splitlines()[1:] == ["seq 1", "seq 2", "seq 3", "seq 4", "4"]
    assert "tokens are never typed here" in said.err
    assert history.read_text().splitlines() == ["set kiwi green", "count"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    up = "\x1b[A"
    await asyncio.to_thread(work, f"{up}\rexit\r", history)
    assert capsys.readouterr().out.splitlines()[1:] == ["4"]
    await asyncio.to_thread(work, "get kiwi\rexit\r", None)
    assert history.read_text().splitlines()[-1] == "exit"


async def _opened(target: Target) -> Client:
    return target.client(retry=FAIL_FAST)


def test_a_history_is_bounded(tmp_path: Path) -> None:
    """A long history is cut to its newest lines when it is opened, and stays private."""
    path = tmp_path / "history"
    path.write_text("".join(f"get {n}\n" for n in range(2 * HISTORY_LINES_MAX + 1)))
    path.chmod(0o644)
    history = LineHistory(path)
    assert len(path.read_text().splitlines()) == HISTORY_LINES_MAX
    assert next(iter(history.load_history_strings())) == f"get {2 * HISTORY_LINES_MAX}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_piped_lines_end_where_no_server_is() -> None:
    """All lines run, and the first failure is the exit code, until there is no server."""
    with asyncio.Runner() as runner:
        target = Target(("127.0.0.1:1",), timeout_ms=1_000)
        client = runner.run(_opened(target))
        lines = iter(["nonsense", "get a", "get b"])
        assert run_lines(Shell(client, target), runner, lines) == 2
        assert list(lines) == ["get b"]
        runner.run(client.aclose())
