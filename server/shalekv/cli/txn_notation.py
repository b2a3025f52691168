r"""The notation of transactions: a line for each comparison and each operation.

    # comparisons; all must hold
    exists KEY                 missing KEY
    seq KEY = 12               also != < >; a key without a value has seq 0
    value KEY = VALUE          also != < >
    empty --prefix KEY         empty --start KEY --end KEY

    # operations, when they hold
    get KEY
    put KEY VALUE              put KEY VALUE --ttl 10m
    add KEY                    add KEY -3
    delete KEY                 delete --prefix KEY, delete --start KEY --end KEY

    # operations, when one of them does not hold
    get KEY

An empty line ends a part, and two of them are an empty part; a first part that begins with an
operation says that there are no comparisons. Lines that begin with # are left out. Words are split
as a shell does: quotes keep blanks, and outside of quotes a backslash takes the next character as
it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from shalekv.cli.console.keys import Encoding
from shalekv.cli.console.units import duration_ms
from shalekv.cli.ranges import RangeArguments
from shalekv_client import (
    Add,
    Compare,
    Delete,
    DeleteRange,
    Exists,
    Get,
    Missing,
    Operator,
    Put,
    RangeEmpty,
    SeqIs,
    TxnOperation,
    ValueIs,
)

ParsedT = TypeVar("ParsedT")

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
    "delete KEY",
    "delete --prefix KEY",
    "delete --start KEY --end KEY",
)
_PARTS = ("comparisons", "operations", "operations of the else branch")
_OPERATION_WORDS = frozenset(operation.split()[0] for operation in OPERATIONS)
_FIRST_WORD = re.compile(r"[^ \t\r]+")  # other white space separates no words
_NESTED = frozenset("txn if then else otherwise".split())


class NotationError(ValueError):
    """What was written is no transaction. Says where, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Script:
    """A transaction as it was written."""

    compares: tuple[Compare, ...] = ()
    then: tuple[TxnOperation, ...] = ()
    otherwise: tuple[TxnOperation, ...] = ()

    def __add__(self, other: Script) -> Script:
        """Both, part by part."""
        return Script(
            self.compares + other.compares,
            self.then + other.then,
            self.otherwise + other.otherwise,
        )


def parse_script(text: str, encoding: Encoding) -> Script:
    """The transaction that `text` writes down. Raises `NotationError`, with the line."""
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
    """The lines of each part, with their places. What comes before the first line is no part."""
    parts: list[list[tuple[str, str]]] = [[]]
    is_commented = False  # and nothing else is in the part yet
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
    """The comparisons of `lines`, each of which has the place where it stands."""
    return (_placed(place, line, encoding, _compare) for place, line in lines)


def parse_operations(
    lines: Iterable[tuple[str, str]], encoding: Encoding
) -> Iterator[TxnOperation]:
    """The operations of `lines`, each of which has the place where it stands."""
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
    match words:
        case ["exists", key]:
            return Exists(decode(key))
        case ["missing", key]:
            return Missing(decode(key))
        case ["seq", key, op, number] if op in OPERATORS and _is_number(number):
            return SeqIs(decode(key), int(number), OPERATORS[op])
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
        case ["delete", key]:
            return Delete(decode(key))
        case ["delete", *range_words] if is_range(range_words):
            return DeleteRange(**_range(range_words, decode))
        case [word, *_] if word in _NESTED:
            raise NotationError(
                f"'{word}': a transaction cannot stand inside another one; "
                "run a second one, which depends on what the first one did"
            )
        case _:
            raise NotationError(_unknown("operation", words, OPERATIONS))


def is_range(words: Sequence[str]) -> bool:
    """Whether these are the words of a range: ``--prefix KEY``, ``--start KEY --end KEY``."""
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
