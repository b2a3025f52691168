r"""Console transcripts: commands and what they print, played and compared.

    # A comment. An empty line separates commands.
    $ printf 'a\t1\n' | shalekv load
    loaded 1 row, <any>

    $ SHALEKV_ADDR=$NOWHERE shalekv get a
    ! Error: 127.0.0.1:1: no connection to the server: <any>
    ...
    ? 9

Standard output comes first, with an arrow for each TAB; lines of standard error have a `! ` before
them, but no reminder of the usage; `? 9` is an exit code other than 0. `shalekv` runs within this
process, unless the line begins with `$$`; any other program is started. `<int>` and the other
`PLACEHOLDERS` stand for what varies; `<id=hex>` keeps it as `$id` for the lines below. A line `...`
stands for any lines.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import structlog
from click.testing import CliRunner

from shalekv.cli.main import main

PLACEHOLDERS: Mapping[str, str] = {
    "any": r".*?",
    "int": r"-?\d[\d,]*",
    "number": r"-?\d[\d,]*(?:\.\d+)?",
    "hex": r"[0-9a-f]+",
    "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "backup": r"\d{8}T\d{9}Z-[0-9a-f]{8}",
    "time": r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[+]00:00|Z)?",
}
# Text that varies from run to run, and its placeholder when a transcript is updated.
_VARYING = (
    *(
        (rf"(?<![\w-]){PLACEHOLDERS[kind]}(?![\w-])", f"<{kind}>")
        for kind in ("time", "uuid", "backup")
    ),
    (r"(\bseq[ \N{RIGHTWARDS ARROW}]|\"(?:seq|wal_id|expire_at_ms)\": ?)\d+", r"\1<int>"),
    (r"(?<![\w$-])(?!0{32})[0-9a-f]{32}(?!\w)", "<hex>"),
    (r"in [\d.]+ s \([\d.,]+", "in <number> s (<number>"),
)
_USAGE = re.compile(r"\AUsage: shalekv.*\nTry .*\n\n")
_PLACEHOLDER = re.compile(rf"<(?:(\w+)=)?({'|'.join(PLACEHOLDERS)})>")
_TAB, _EMPTY, _NO_END = (
    "\N{RIGHTWARDS ARROW}",
    "\N{SYMBOL FOR NEWLINE}",
    "\N{SYMBOL FOR END OF TEXT}",
)
_ANY_LINES = "..."


@dataclass
class Step:
    """A command, and its expected output."""

    line: int
    command: str
    is_process: bool
    expected: list[str]


@dataclass
class Session:
    """State shared by the commands of one transcript."""

    variables: dict[str, str]  # `$NAME` in the transcript
    environment: Mapping[str, str]
    folder: Path  # in which programs run
    failures: list[str] = field(default_factory=list)

    def play(self, text: str) -> str:
        """Run all commands. Returns the updated transcript; differences are in `failures`."""
        lines, played, at = text.splitlines(), [], 0
        while at < len(lines):
            line = lines[at]
            played.append(line)
            at += 1
            if not line.startswith(("$ ", "$$ ")):
                continue
            begin = at
            while at < len(lines) and lines[at]:
                at += 1
            sign, _, command = line.partition(" ")
            step = Step(begin, command, sign == "$$", lines[begin:at])
            played += self._checked(step)
        return "\n".join(played) + "\n"

    def _checked(self, step: Step) -> list[str]:
        """Run one command. Returns the printed lines, or the expected ones where they match."""
        actual = self._run(step)
        pattern = "".join(map(self._pattern, step.expected))
        found = re.fullmatch(pattern, "".join(f"{line}\n" for line in actual))
        if found is not None:
            self.variables |= found.groupdict()
            return step.expected
        shown = "".join(f"  {line}\n" for line in actual)
        self.failures.append(f"line {step.line}: $ {step.command}\nprinted:\n{shown}")
        return [self._written(line, step.expected) for line in actual]

    def _pattern(self, expected: str) -> str:
        if expected == _ANY_LINES:
            return r"(?:.*\n)*?"
        parts, at = [], 0
        for found in _PLACEHOLDER.finditer(expected):
            parts.append(re.escape(self._substituted(expected[at : found.start()])))
            name, kind = found.groups()
            parts.append(f"(?P<{name}>{PLACEHOLDERS[kind]})" if name else PLACEHOLDERS[kind])
            at = found.end()
        return "".join([*parts, re.escape(self._substituted(expected[at:])), r"\n"])

    def _written(self, line: str, expected: list[str]) -> str:
        for each in expected:
            found = re.fullmatch(self._pattern(each), f"{line}\n")
            if found is not None and each != _ANY_LINES:
                self.variables |= found.groupdict()
                return each
        for name, value in sorted(self.variables.items(), key=lambda pair: -len(pair[1])):
            line = line.replace(value, f"${name}") if len(value) > 7 else line
        for pattern, placeholder in _VARYING:
            line = re.sub(pattern, placeholder, line)
        return line

    def _substituted(self, text: str) -> str:
        return re.sub(r"\$(\w+)", lambda m: self.variables.get(m[1], m[0]), text)

    def _run(self, step: Step) -> list[str]:
        """Run a pipeline. Returns its output in the form of a transcript."""
        lexer = shlex.shlex(step.command, posix=True, punctuation_chars="|>")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = [self._substituted(word) for word in lexer]
        code, output, errors = 0, b"", b""
        target = self.folder / words.pop() if words[-2:-1] == [">"] else None
        for is_pipe, stage in groupby(words, lambda word: word in {"|", ">"}):
            if not is_pipe:
                code, output, said = self._stage(list(stage), output, step)
                errors += said
        if target is not None:
            target.write_bytes(output)
            output = b""
        shown = [line.replace("\t", _TAB) or _EMPTY for line in _lines(output)]
        shown += [f"! {line}".rstrip().replace("\t", _TAB) for line in _lines(errors)]
        return [*shown, *([f"? {code}"] if code else [])]

    def _stage(self, words: list[str], stdin: bytes, step: Step) -> tuple[int, bytes, bytes]:
        environment = dict(self.environment)
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        if words[0] == "shalekv" and not step.is_process:
            return _in_process(words, stdin, environment)
        done = subprocess.run(
            words, input=stdin, capture_output=True, check=False, env=environment, cwd=self.folder
        )
        return done.returncode, done.stdout, done.stderr


def _in_process(
    words: list[str], stdin: bytes, environment: Mapping[str, str]
) -> tuple[int, bytes, bytes]:
    code: object = 0
    changed = {name: environment.get(name) for name in {*environment, *os.environ}}
    with CliRunner().isolation(stdin, env=changed) as (stdout, stderr, _), _as_before(words):
        try:
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        return int(str(code or 0)), stdout.getvalue(), stderr.getvalue()


@contextmanager
def _as_before(words: list[str]) -> Iterator[None]:
    """Restore the arguments of this process, and its logging."""
    argv, root = sys.argv, logging.getLogger()
    handlers, level = root.handlers[:], root.level
    sys.argv = words
    try:
        yield
    finally:
        sys.argv, root.handlers[:], root.level = argv, handlers, level
        logging.captureWarnings(capture=False)
        structlog.reset_defaults()


def _lines(data: bytes) -> list[str]:
    """Split output into lines, and mark a last line without an end."""
    text = _USAGE.sub("", data.decode(errors="backslashreplace")).replace("\r\n", "\n")
    if text and not text.endswith("\n"):
        text += f"{_NO_END}\n"
    return text.removesuffix("\n").split("\n") if text else []
