"""`shalekv txn`: run a transaction, which compares keys and then reads and writes, in one commit.

A transaction is written as one line for each comparison and each operation:

    # comparisons; all must hold
    exists KEY                 missing KEY
    seq KEY = 12               also != < >; a key without a value has seq 0
    value KEY = VALUE          also != < >
    empty --prefix KEY         empty --start KEY --end KEY

    # operations if all hold
    get KEY
    put KEY VALUE              put KEY VALUE --ttl 10m
    add KEY                    add KEY -3
    touch KEY 10m              touch KEY never
    delete KEY                 delete --prefix KEY, delete --start KEY --end KEY

    # operations if one of them does not hold
    get KEY

An empty line ends a part, and two empty lines in a row make an empty part. If the first part begins
with an operation, there are no comparisons. Lines that begin with # are ignored. Words are split as
by a shell: quotes preserve blanks, and a backslash outside of quotes makes the next character
literal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

import click

from shalekv.cli.console.connection import (
    ClientExit,
    Target,
    durability_option,
    exit_codes_of_calls,
    target_options,
)
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.options import RangeArguments
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv.cli.console.units import duration_ms, ttl_ms
from shalekv.wording import counted
from shalekv_client import (
    Add,
    Compare,
    Delete,
    DeleteRange,
    Durability,
    Exists,
    Get,
    Missing,
    Operator,
    Put,
    RangeEmpty,
    SeqIs,
    Touch,
    TxnOperation,
    TxnResult,
    Value,
    ValueIs,
)
from shalekv_client.one_call import OneCallClient
from shalekv_client.results import OperationResult

ParsedT = TypeVar("ParsedT")

COLUMNS = ("operation", "key", "value", "seq")

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "=": Operator.EQUAL,
        "!=": Operator.NOT_EQUAL,
        "<": Operator.LESS,
        ">": Operator.GREATER,
    }
)

COMPARISONS = (
    "exists KEY",
    "missing KEY",
    "seq KEY = NUMBER",
    "value KEY = VALUE",
    "empty --prefix KEY",
    "empty --start KEY --end KEY",
)
OPERATIONS = (
    "get KEY",
    "put KEY VALUE [--ttl TIME]",
    "add KEY [DELTA]",
    "touch KEY TIME",
    "touch KEY never",
    "delete KEY",
    "delete --prefix KEY",
    "delete --start KEY --end KEY",
)
_PARTS = ("comparisons", "operations", "operations of the else branch")
_OPERATION_WORDS = frozenset(operation.split()[0] for operation in OPERATIONS)
_FIRST_WORD = re.compile(r"[^ \t\r]+")  # other white space does not separate words
_NESTED = frozenset("txn if then else otherwise".split())

_HELP = """Run a transaction: compare keys, then do one of two lists of operations, in one commit.

If all comparisons (--if) hold, the operations of --then are done, otherwise those of --else. The
output begins with what happened, and --format raw with the name of the branch; the exit code is 0
for then, and 13 for else.

\b
Comparisons:                          Operations:
  exists KEY                            get KEY        before this transaction
  missing KEY                           put KEY VALUE  [--ttl 10m]
  seq KEY = 12      (= != < >)          add KEY -3     (1 without a number)
  value KEY = VALUE (= != < >)          touch KEY 10m  change the expiry, or `never`
  empty --prefix KEY                    delete KEY
  empty --start KEY --end KEY           delete --prefix KEY
                                        delete --start KEY --end KEY

Words are split as by a shell: quote blanks, and the backslashes of --escaped. FILE (- is standard
input) has one comparison or operation on each line: comparisons, an empty line, operations, an
empty line, operations of the else branch; lines that begin with # are comments. Comparisons and
operations of the options are appended to those of FILE. Transactions cannot be nested.

\b
Examples:
  shalekv txn --if 'missing lock' --then 'put lock me --ttl 30s' --else 'get lock'
  shalekv txn --if 'seq config = 12' --then 'put config "a b"' --then 'add config/edits'
  shalekv txn --then 'get a' --then 'get b'             two keys from one state
  shalekv txn examples/reserve_seat.txn --format json
  shalekv txn --escaped --if 'exists "row\\x00"' --then 'delete "row\\x00"'
"""


class NotationError(ValueError):
    """The text is no valid transaction. The message has the place and the problem."""


@dataclass(frozen=True, slots=True)
class Script:
    """A parsed transaction."""

    compares: tuple[Compare, ...] = ()
    then: tuple[TxnOperation, ...] = ()
    otherwise: tuple[TxnOperation, ...] = ()

    def __add__(self, other: Script) -> Script:
        """Concatenate two transactions, part by part."""
        return Script(
            self.compares + other.compares,
            self.then + other.then,
            self.otherwise + other.otherwise,
        )


def parse_script(text: str, encoding: Encoding) -> Script:
    """Parse a transaction. Raises `NotationError` with the line."""
    parts = _parts(text)
    while len(parts) > len(_PARTS):
        if more := parts.pop():
            raise NotationError(
                f"{more[0][0]}: a transaction has {len(_PARTS)} parts ({', '.join(_PARTS)}), with "
                "an empty line between them, and this is one more"
            )
    parts += [[]] * (len(_PARTS) - len(parts))
    return Script(
        tuple(parse_compares(parts[0], encoding)),
        tuple(parse_operations(parts[1], encoding)),
        tuple(parse_operations(parts[2], encoding)),
    )


def _parts(text: str) -> list[list[tuple[str, str]]]:
    """The lines of each part, with their places. Empty lines before the first line are skipped."""
    parts: list[list[tuple[str, str]]] = [[]]
    is_commented = False  # the previous line is a comment
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip(" \t\r")
        if words.startswith("#"):
            is_commented = True
            continue
        if words:
            parts[-1].append((f"line {number}", words))
        elif parts[-1] or (len(parts) > 1 and not is_commented):
            parts.append([])
        is_commented = False
    if parts[0] and _FIRST_WORD.findall(parts[0][0][1])[0] in _OPERATION_WORDS:
        parts.insert(0, [])
    return parts


def parse_compares(lines: Iterable[tuple[str, str]], encoding: Encoding) -> Iterator[Compare]:
    """Parse comparisons; `lines` are pairs of a place, for errors, and a text."""
    return (_placed(place, line, encoding, _compare) for place, line in lines)


def parse_operations(
    lines: Iterable[tuple[str, str]], encoding: Encoding
) -> Iterator[TxnOperation]:
    """Parse operations; `lines` are pairs of a place, for errors, and a text."""
    return (_placed(place, line, encoding, _operation) for place, line in lines)


def _placed(
    place: str,
    line: str,
    encoding: Encoding,
    parse: Callable[[Sequence[str], Callable[[str], bytes]], ParsedT],
) -> ParsedT:
    try:
        return parse(shlex.split(line), encoding.decode)
    except ValueError as error:  # `shlex` says what is wrong with quotes
        raise NotationError(f"{place}: {error}") from None


def _compare(words: Sequence[str], decode: Callable[[str], bytes]) -> Compare:
    if words[1:2] == [""]:
        raise ValueError(f"'{words[0]}' needs a key, and this one is empty")
    match words:
        case ["exists", key]:
            return Exists(decode(key))
        case ["missing", key]:
            return Missing(decode(key))
        case ["seq", key, op, number] if op in OPERATORS and _is_number(number):
            return SeqIs(decode(key), seq=int(number), op=OPERATORS[op])
        case ["value", key, op, value] if op in OPERATORS:
            return ValueIs(decode(key), decode(value), OPERATORS[op])
        case ["empty", *range_words] if is_range(range_words):
            return RangeEmpty(**_range(range_words, decode))
        case _:
            raise NotationError(_unknown("comparison", words, COMPARISONS))


def _operation(words: Sequence[str], decode: Callable[[str], bytes]) -> TxnOperation:
    match words:
        case ["get", key]:
            return Get(decode(key))
        case ["put", key, value]:
            return Put(decode(key), decode(value))
        case ["put", key, value, "--ttl", time]:
            return Put(decode(key), decode(value), duration_ms(time))
        case ["add", key]:
            return Add(decode(key))
        case ["add", key, delta] if _is_number(delta.removeprefix("-")):
            return Add(decode(key), int(delta))
        case ["touch", key, time]:
            return Touch(decode(key), ttl_ms(time))
        case ["delete", key]:
            return Delete(decode(key))
        case ["delete", *range_words] if is_range(range_words):
            return DeleteRange(**_range(range_words, decode))
        case [word, *_] if word in _NESTED:
            raise NotationError(
                f"'{word}': a transaction cannot be nested in another; "
                "run a second one, which depends on what the first one did"
            )
        case _:
            raise NotationError(_unknown("operation", words, OPERATIONS))


def is_range(words: Sequence[str]) -> bool:
    """Return whether the words are a range: ``--prefix KEY`` or ``--start KEY --end KEY``."""
    names = tuple(words[::2])
    is_known = names in {("--prefix",), ("--start",), ("--end",), ("--start", "--end")}
    return is_known and len(words) == 2 * len(names)


def _range(words: Sequence[str], decode: Callable[[str], bytes]) -> RangeArguments:
    given = {name: decode(word) for name, word in zip(words[::2], words[1::2], strict=True)}
    return {
        "start": given.get("--start", b""),
        "end": given.get("--end", b""),
        "prefix": given.get("--prefix", b""),
    }


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal()


def _unknown(kind: str, words: Sequence[str], known: Sequence[str]) -> str:
    return f"'{shlex.join(words)}' is no {kind}; these are: {'; '.join(known)}"


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("file", type=click.File(encoding="utf-8", errors="surrogateescape"), required=False)
@click.option("--if", "compares", multiple=True, metavar="COMPARISON", help="What must hold.")
@click.option("--then", multiple=True, metavar="OPERATION", help="What to do if all hold.")
@click.option("--else", "otherwise", multiple=True, metavar="OPERATION", help="What to do if not.")
@encoding_options
@format_option
@durability_option
@target_options
def txn(
    *,
    file: TextIO | None,
    compares: Sequence[str],
    then: Sequence[str],
    otherwise: Sequence[str],
    encoding: Encoding,
    output_format: Format,
    durability: Durability,
    target: Target,
) -> None:
    """Run the transaction, and print the branch and the results."""
    try:
        script = Script() if file is None else parse_script(file.read(), encoding)
        script += Script(
            tuple(parse_compares(_places("--if", compares), encoding)),
            tuple(parse_operations(_places("--then", then), encoding)),
            tuple(parse_operations(_places("--else", otherwise), encoding)),
        )
    except NotationError as error:
        raise click.UsageError(str(error)) from None
    if not (script.then or script.otherwise):
        raise click.UsageError("there is nothing to do: give --then, --else or FILE")

    async def call(client: OneCallClient) -> TxnResult:
        return await client.txn(
            script.compares, script.then, script.otherwise, durability=durability
        )

    found = talk_once(target, call, mutates=True)
    with printing():
        _print(script, found, encoding, output_format)
    if not found.succeeded:
        raise SystemExit(ClientExit.CONDITION)


def _print(
    script: Script,
    found: TxnResult,
    encoding: Encoding,
    output_format: Format,
) -> None:
    branch = "then" if found.succeeded else "else"
    done = script.then if found.succeeded else script.otherwise
    results = list(zip(done, found.results, strict=True))
    if output_format is Format.JSON:
        print_json(
            {
                "branch": branch,
                "seq": found.seq,
                "results": [_record(*result, encoding) for result in results],
            }
        )
        return
    if output_format is Format.RAW:
        print_line(f"{branch}\t{found.seq}")
    else:
        print_line(_outcome(script, done, found))
        results = [each for each in results if isinstance(each[0], Get) or each[1] is not None]
    if results:
        print_rows(output_format, COLUMNS, (_row(*result, encoding) for result in results))


def _outcome(script: Script, done: Sequence[TxnOperation], found: TxnResult) -> str:
    """Format what was compared and changed, such as ``condition held; 1 change committed``."""
    changes = sum(not isinstance(operation, Get) for operation in done)
    changed = f"{counted(changes, 'change')} committed" if changes else "nothing to change"
    if not script.compares:
        return f"{changed}, seq {found.seq}"
    conditions = "condition" if len(script.compares) == 1 else "conditions"
    held = "held" if found.succeeded else "did not hold"
    return f"{conditions} {held}; {changed}, seq {found.seq}"


def _places(option: str, lines: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((option, line) for line in lines)


def _row(
    operation: TxnOperation, result: OperationResult, encoding: Encoding
) -> tuple[str | int | None, ...]:
    """The cells of `COLUMNS`."""
    name, target = _named(operation)
    formatted = " ".join(
        encoding.encode(word) if at == "key" else f"--{at} {encoding.encode(word)}"
        for at, word in target.items()
    )
    match result:
        case Value():
            return (name, formatted, encoding.encode(result.value), result.seq)
        case bool():
            return (name, formatted, "found" if result else "not found", None)
        case _:
            return (name, formatted, None if result is None else str(result), None)


def _record(operation: TxnOperation, result: OperationResult, encoding: Encoding) -> Record:
    name, target = _named(operation)
    record: dict[str, Any] = {"operation": name}
    for at, word in target.items():
        record |= json_field(at, word, encoding)
    match operation, result:
        case Get(), Value():
            record |= {"found": True, **json_field("value", result.value, encoding)}
            record |= {"seq": result.seq, "expire_at_ms": result.expire_at_ms}
        case Get(), _:
            record["found"] = False
        case Add(), _:
            record["value"] = result
        case Touch(), _:
            record["found"] = result
    return record


def _named(operation: TxnOperation) -> tuple[str, dict[str, bytes]]:
    """The name of an operation, and its key or the bounds of its range."""
    match operation:
        case Get(key):
            return "get", {"key": key}
        case Put(key):
            return "put", {"key": key}
        case Add(key):
            return "add", {"key": key}
        case Touch(key):
            return "touch", {"key": key}
        case Delete(key):
            return "delete", {"key": key}
        case DeleteRange(start, end, prefix):
            ends = {"start": start, "end": end, "prefix": prefix}
            return "delete", {at: word for at, word in ends.items() if word}
