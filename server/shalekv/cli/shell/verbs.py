"""Verbs of `shalekv shell`, all with one client."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import click

from shalekv.cli.commands.delete import counted_delete, deleted_text
from shalekv.cli.commands.get import counter_of
from shalekv.cli.commands.watch import EventPrinter
from shalekv.cli.console.connection import ClientExit, Target
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.failures import exit_code_of_call, failure_lines
from shalekv.cli.console.keys import Encoding, printable
from shalekv.cli.console.options import RangeArguments
from shalekv.cli.console.output import Format, print_line
from shalekv.cli.console.units import NEVER, US_PER_MS, duration_ms, time, ttl_ms
from shalekv.cli.shell.language import (
    COMMENT,
    Arguments,
    Form,
    LanguageError,
    arguments_of,
    quoted,
    split,
)
from shalekv_client import (
    Client,
    Commit,
    Condition,
    Exists,
    Missing,
    ShaleKVError,
    WatchCommit,
)

INT64 = range(-(2**63), 2**63)
_INTEGER = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_RANGE = frozenset({"--prefix", "--start", "--end"})


class Shell:
    """Runs lines with one client, and prints what they find."""

    def __init__(self, client: Client, target: Target) -> None:
        """Run lines with `client`, which was made for `target`."""
        self.client = client
        self.target = target
        self.is_over = False  # the line `exit` was run

    async def run(self, line: str) -> int:
        """Run one line, and return the exit code that a command of the same effect would have."""
        mutates = False
        if line.lstrip().startswith(COMMENT):
            return ExitCode.OK
        try:
            words = split(line)
            if not words:
                return ExitCode.OK
            verb = verb_of(words[0].text)
            mutates = verb.mutates
            try:
                return await verb.run(self, arguments_of(words[1:], verb.form))
            except LanguageError as error:
                raise LanguageError(f"{error}. Usage: {verb.usage}") from None
        except LanguageError as error:
            complain(f"Error: {error}")
            return ExitCode.USAGE
        except ShaleKVError as error:
            for text in failure_lines(error, self.target, mutates=mutates):
                complain(text)
            return exit_code_of_call(error)
        finally:
            sys.stdout.flush()

    async def get(self, arguments: Arguments) -> int:
        (key,) = arguments.words
        found = await self.client.get(key)
        if found is None:
            return _not_found(key)
        number = counter_of(found)
        print_line(printable(found.value, keep="\n\t") if number is None else str(number))
        return ExitCode.OK

    async def set(self, arguments: Arguments) -> int:
        key, value = arguments.words
        ttl = arguments.options.get("--ttl")
        conditions: list[Condition] = []
        if "--if-absent" in arguments.flags:
            conditions.append(Missing())
        if "--if-present" in arguments.flags:
            conditions.append(Exists())
        if len(conditions) > 1:
            raise LanguageError("--if-absent and --if-present exclude each other")
        commit = await self.client.put(
            key,
            value,
            ttl_ms=0 if ttl is None else _time(duration_ms, ttl.text),
            condition=conditions[0] if conditions else None,
        )
        print_line(f"seq {commit.seq}")
        return ExitCode.OK

    async def delete(self, arguments: Arguments) -> int:
        if bool(arguments.words) == bool(arguments.options):
            raise LanguageError("it takes either keys or a range")
        if arguments.options:
            keys = _range(arguments)
            commit, why_not = await counted_delete(partial(_delete_range, self.client, keys))
            print_line(deleted_text(commit, None, why_not))
        for key in arguments.words:
            commit, why_not = await counted_delete(partial(_delete_key, self.client, key))
            print_line(deleted_text(commit, _shown(key), why_not))
        return ExitCode.OK

    async def keys(self, arguments: Arguments) -> int:
        limit = arguments.number("--limit")
        scan = self.client.scan(**_range(arguments), limit=limit, keys_only=True)
        async with scan as entries:
            async for entry in entries:
                print_line(_shown(entry.key))
        return ExitCode.OK

    async def scan(self, arguments: Arguments) -> int:
        limit, reverse = arguments.number("--limit"), "--reverse" in arguments.flags
        scan = self.client.scan(**_range(arguments), limit=limit, reverse=reverse)
        async with scan as entries:
            async for entry in entries:
                print_line(f"{_shown(entry.key)}\t{printable(entry.value)}")
        return ExitCode.OK

    async def exists(self, arguments: Arguments) -> int:
        code: int = ExitCode.OK
        for key in arguments.words:
            if await self.client.exists(key):
                print_line(_shown(key))
            else:
                code = _not_found(key)
        return code

    async def incr(self, arguments: Arguments) -> int:
        key, *rest = arguments.words
        delta = rest[0].decode(errors="replace") if rest else "1"
        if not _INTEGER.fullmatch(delta) or int(delta) not in INT64:
            raise LanguageError("a counter is changed by a whole number of 64 bits")
        print_line(str(await self.client.add(key, int(delta))))
        return ExitCode.OK

    async def ttl(self, arguments: Arguments) -> int:
        (key,) = arguments.words
        found = await self.client.describe(key)
        if found is None:
            return _not_found(key)
        print_line(NEVER if found.ttl_ms is None else time(found.ttl_ms * US_PER_MS))
        return ExitCode.OK

    async def expire(self, arguments: Arguments) -> int:
        key, text = arguments.words
        life_ms = _time(ttl_ms, text.decode(errors="replace"))
        return ExitCode.OK if await self.client.touch(key, life_ms) else _not_found(key)

    async def persist(self, arguments: Arguments) -> int:
        (key,) = arguments.words
        return ExitCode.OK if await self.client.touch(key) else _not_found(key)

    async def count(self, arguments: Arguments) -> int:
        limit = arguments.number("--limit")
        found = await self.client.count(**_range(arguments), limit=limit)
        print_line(str(found.count))
        if found.more:
            complain("There are more keys: the count stopped at --limit.")
        return ExitCode.OK

    async def watch(self, arguments: Arguments) -> int:
        left = arguments.number("--limit")
        printer = EventPrinter(Encoding.TEXT, Format.RAW, has_previous=False, shows_progress=False)
        from_seq = arguments.number("--from-seq")
        async with self.client.watch(**_range(arguments), from_seq=from_seq) as events:
            async for event in events:
                printer.print(event)
                sys.stdout.flush()
                if isinstance(event, WatchCommit):
                    left -= 1
                    if not left:
                        break
        return ExitCode.OK

    async def status(self, _arguments: Arguments) -> int:
        found = await self.client.status()
        role = found.view.role.name.lower() if found.view.role else "server"
        up = time(found.uptime_ms * US_PER_MS)
        print_line(
            f"{self.client.address}: {role} of {found.url} at seq {found.view.seq}, "
            f"version {found.version}, up {up}"
        )
        return ExitCode.OK

    async def help(self, arguments: Arguments) -> int:
        if arguments.words:
            verb = verb_of(arguments.words[0].decode(errors="replace"))
            print_line(f"{verb.usage}\n  {verb.summary}")
            return ExitCode.OK
        width = max(len(verb.usage) for verb in VERBS.values())
        for verb in VERBS.values():
            print_line(f"{verb.usage:<{width}}  {verb.summary}")
        print_line(_HELP)
        return ExitCode.OK

    async def exit(self, _arguments: Arguments) -> int:
        self.is_over = True
        return ExitCode.OK


Run: TypeAlias = Callable[[Shell, Arguments], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class ShellVerb:
    """A verb of the shell."""

    usage: str
    summary: str
    run: Run
    form: Form
    mutates: bool

    @property
    def takes_keys(self) -> bool:
        """Return whether the words behind it are keys, or how keys begin."""
        return "KEY" in self.usage or "PREFIX" in self.usage


def _verb(
    usage: str, summary: str, run: Run, words: tuple[int, int | None], *, mutates: bool = False
) -> ShellVerb:
    """Describe a verb with a number of words; its options are those of the usage."""
    found = re.findall(r"(--[a-z-]+)( [A-Z]+)?", usage)
    options = {name for name, value in found if value}
    flags = {name for name, value in found if not value}
    if "PREFIX" in usage:
        options |= _RANGE
    return ShellVerb(
        usage, summary, run, Form(*words, frozenset(options), frozenset(flags)), mutates
    )


VERBS: Mapping[str, ShellVerb] = MappingProxyType(
    {
        verb.usage.split()[0]: verb
        for verb in (
            _verb("get KEY", "Print the value of a key.", Shell.get, (1, 1)),
            _verb(
                "set KEY VALUE [--ttl TIME] [--if-absent] [--if-present]",
                "Set the value of a key.",
                Shell.set,
                (2, 2),
                mutates=True,
            ),
            _verb(
                "del KEY... | --prefix P | --start A --end B",
                "Delete keys, or a range of keys.",
                Shell.delete,
                (0, None),
                mutates=True,
            ),
            _verb("keys [PREFIX] [--limit N]", "Print keys in order.", Shell.keys, (0, 1)),
            _verb(
                "scan [PREFIX] [--limit N] [--reverse]",
                "Print keys and values in order.",
                Shell.scan,
                (0, 1),
            ),
            _verb("exists KEY...", "Print those keys that have a value.", Shell.exists, (1, None)),
            _verb(
                "incr KEY [NUMBER]",
                "Add to a counter: 1, or a number that may be negative.",
                Shell.incr,
                (1, 2),
                mutates=True,
            ),
            _verb("ttl KEY", "Print how long a key lives.", Shell.ttl, (1, 1)),
            _verb(
                "expire KEY TIME",
                "Make a key expire: after 500ms, 10s, 5m, 2h, 1d, or never.",
                Shell.expire,
                (2, 2),
                mutates=True,
            ),
            _verb("persist KEY", "Make a key never expire.", Shell.persist, (1, 1), mutates=True),
            _verb("count [PREFIX] [--limit N]", "Count keys.", Shell.count, (0, 1)),
            _verb(
                "watch [PREFIX] [--from-seq N] [--limit N]",
                "Print commits as they happen; Ctrl-C ends it.",
                Shell.watch,
                (0, 1),
            ),
            _verb("status", "Say what server this is.", Shell.status, (0, 0)),
            _verb("help [VERB]", "List the verbs, or explain one.", Shell.help, (0, 1)),
            _verb("exit", "Leave the shell, as Ctrl-D does.", Shell.exit, (0, 0)),
        )
    }
)

# The names of the same in the commands of `shalekv`, and in other databases.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "put": "set",
        "delete": "del",
        "rm": "del",
        "unlink": "del",
        "ls": "keys",
        "add": "incr",
        "incrby": "incr",
        "touch": "expire",
        "dbsize": "count",
        "quit": "exit",
        "?": "help",
    }
)

# What to type in place of a word of other databases that means something else here.
KINDRED: Mapping[str, str] = MappingProxyType(
    {
        "mget": "get KEY, once for each key",
        "hget": "get KEY",
        "getex": "get KEY, then expire KEY TIME",
        "mset": "set KEY VALUE, once for each key; `shalekv txn` writes them in one commit",
        "hset": "set KEY VALUE",
        "setex": "set KEY VALUE --ttl TIME",
        "psetex": "set KEY VALUE --ttl TIME",
        "setnx": "set KEY VALUE --if-absent",
        "decr": "incr KEY -1",
        "decrby": "incr KEY -5",
        "pttl": "ttl KEY",
        "pexpire": "expire KEY 500ms",
        "range": "scan --start A --end B",
        "lease": "expire KEY TIME",
        "subscribe": "watch [PREFIX]",
        "psubscribe": "watch [PREFIX]",
        "monitor": "watch",
        "info": "status",
        "ping": "status",
        "multi": "shalekv txn --help, outside of the shell",
        "txn": "shalekv txn --help, outside of the shell",
        "flushdb": "shalekv delete --all --yes, outside of the shell",
        "flushall": "shalekv delete --all --yes, outside of the shell",
        "auth": "shalekv shell --token-file FILE: tokens are never typed here",
    }
)

_HELP = r"""
PREFIX may be left out, or be a range: --start A (included) --end B (excluded).
Quotes preserve blanks: "a key". Outside of 'single quotes' there are escapes: \x00, \n."""


def verb_of(name: str) -> ShellVerb:
    """Return the verb with this name, in any case. Raises `LanguageError` with a suggestion."""
    word = name.lower()
    verb = VERBS.get(ALIASES.get(word, word))
    if verb is not None:
        return verb
    close = difflib.get_close_matches(word, [*VERBS, *ALIASES], n=1)
    hint = KINDRED.get(word) or (close[0] if close else "")
    advice = f"Did you mean: {hint}" if hint else "`help` lists the verbs."
    raise LanguageError(
        f"there is no verb {quoted(name.encode(errors='surrogateescape'))}. {advice}"
    )


def complain(text: str) -> None:
    """Print a line on stderr, behind what was printed before."""
    sys.stdout.flush()
    click.echo(text, err=True)


async def _delete_key(client: Client, key: bytes, count: bool) -> Commit:
    return await client.delete(key, count=count)


async def _delete_range(client: Client, keys: RangeArguments, count: bool) -> Commit:
    return await client.delete_range(**keys, count=count)


def _shown(key: bytes) -> str:
    return Encoding.ESCAPED.encode(key)


def _not_found(key: bytes) -> int:
    complain(f"not found: {_shown(key)}")
    return ClientExit.NOT_FOUND


def _range(arguments: Arguments) -> RangeArguments:
    """Return the range of PREFIX, or of the options. Raises `LanguageError` for both."""
    named: RangeArguments = {
        "start": arguments.data("--start"),
        "end": arguments.data("--end"),
        "prefix": arguments.data("--prefix"),
    }
    given = [arguments.words[:1] != (), named["prefix"] != b"", bool(named["start"] + named["end"])]
    if sum(given) > 1:
        raise LanguageError("PREFIX, --prefix, and --start with --end exclude each other")
    if arguments.words:
        named["prefix"] = arguments.words[0]
    return named


def _time(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise LanguageError(str(error)) from None
