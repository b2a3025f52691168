"""The prompt of `shalekv shell`: a terminal with history and completion."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory

from shalekv.cli.shell.language import LanguageError, quoted, split
from shalekv.cli.shell.verbs import VERBS, Shell, verb_of
from shalekv_client import ShaleKVError

HISTORY_LINES_MAX = 1_000
FILE_MODE, FOLDER_MODE = 0o600, 0o700
KEYS_SHOWN_MAX = 20
KEYS_WITHIN_S = 0.5  # a completion that takes longer has no keys
# Access tokens of servers, and web tokens: they belong into no line, and so into no history.
_SECRET = re.compile(r"shalekv_[0-9A-Za-z]{12}_|eyJ[\w-]{10,}\.[\w-]+\.")


def history_path() -> Path:
    """Return the file of the history, by the rules of XDG."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "shalekv" / "shell_history"


class LineHistory(History):
    """The history in a file that only its owner reads: a line for each line that was typed.

    It has no lines that begin with a blank, none that are no verbs (such as `auth TOKEN`, by
    habit), and none with a token.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which is made if there is none. Raises OSError."""
        super().__init__()
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._path = path
        lines = self._lines()
        if len(lines) > 2 * HISTORY_LINES_MAX:
            self._write(os.O_TRUNC, lines[-HISTORY_LINES_MAX:])

    def load_history_strings(self) -> Iterable[str]:
        """Yield the lines, the newest first."""
        yield from reversed(self._lines()[-HISTORY_LINES_MAX:])

    def store_string(self, string: str) -> None:
        """Append a line, if it may be kept."""
        if may_be_kept(string):
            self._write(os.O_APPEND, [string])

    def _lines(self) -> list[str]:
        self._write(os.O_APPEND, [])
        return self._path.read_text(errors="replace").splitlines()

    def _write(self, how: int, lines: list[str]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | how, FILE_MODE)
        with os.fdopen(descriptor, "w", errors="replace") as file:
            os.fchmod(descriptor, FILE_MODE)
            file.writelines(f"{line}\n" for line in lines)


def may_be_kept(line: str) -> bool:
    """Return whether a line may be in the history."""
    if line[:1].isspace() or "\n" in line or _SECRET.search(line):
        return False
    try:
        words = split(line)
        return bool(words) and verb_of(words[0].text) is not None
    except LanguageError:
        return False


class VerbCompleter(Completer):
    """Completes verbs, and keys by what is typed of them."""

    def __init__(self, shell: Shell) -> None:
        """Ask the server of `shell` for keys."""
        self._shell = shell

    def get_completions(self, _document: Document, _event: CompleteEvent) -> Iterator[Completion]:
        """Yield nothing: completions are asynchronous."""
        yield from ()

    async def get_completions_async(
        self, document: Document, _event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        """Yield the verbs, or some keys, that begin with the word before the cursor."""
        text = document.text_before_cursor
        try:
            words = split(text, is_partial=True)
            typed = words.pop() if words and words[-1].end == len(text) else None
            verb = verb_of(words[0].text) if words else None
        except LanguageError:
            return
        place = 0 if typed is None else typed.start - len(text)
        if verb is None:
            beginning = "" if typed is None else typed.text.lower()
            for name, each in VERBS.items():
                if name.startswith(beginning):
                    yield Completion(name, place, display_meta=each.summary)
        elif verb.takes_keys:
            for key in await self._keys(b"" if typed is None else typed.data):
                yield Completion(quoted(key), place)

    async def _keys(self, beginning: bytes) -> list[bytes]:
        """Return some keys, or none if the server does not answer soon."""
        scan = self._shell.client.scan(prefix=beginning, keys_only=True, limit=KEYS_SHOWN_MAX)
        try:
            async with asyncio.timeout(KEYS_WITHIN_S), scan:
                return [entry.key async for entry in scan]
        except (ShaleKVError, TimeoutError):
            return []


def converse(shell: Shell, runner: asyncio.Runner, history: Path | None) -> None:
    """Read lines from the terminal and run them, until Ctrl-D or `exit`.

    Ctrl-C takes back a line that is being typed, or ends the verb that runs. `history` is the file
    of the history; None: it is not kept.
    """
    session: PromptSession[str] = PromptSession(
        f"{shell.target.address}> ",
        history=_history(history),
        completer=VerbCompleter(shell),
        complete_while_typing=False,
    )
    runner.run(shell.run("status"))
    click.echo("`help` lists the verbs; Tab completes; Ctrl-D ends.", err=True)
    while not shell.is_over:
        line = runner.run(_typed(session))
        if line is None:
            return
        try:
            runner.run(shell.run(line))
        except KeyboardInterrupt:
            click.echo(err=True)  # behind the ^C of the terminal


async def _typed(session: PromptSession[str]) -> str | None:
    """Return the next line; empty after Ctrl-C, None after Ctrl-D."""
    try:
        return await session.prompt_async()
    except KeyboardInterrupt:
        return ""
    except EOFError:
        return None


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        return LineHistory(path)
    except OSError as error:
        click.echo(f"No history is kept: {path}: {error.strerror}", err=True)
        return InMemoryHistory()
