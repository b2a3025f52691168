"""Histories written by hand: one line for each call, in the order of their beginnings.

    history("0 3 put a x", "1 2 get a x", "4 . put a y")

A line has the moments of the beginning and the end (a dot: the outcome is unknown), the call, and
what was told. `get a` alone saw no value; `x@7` has a sequence number, for a put its own.
"""

from __future__ import annotations

from tests.linearizability.operations import (
    Add,
    Call,
    Delete,
    Exists,
    Get,
    Kind,
    Operation,
    Put,
    Reply,
    Seen,
    SeqIs,
)


def history(*lines: str) -> list[Call]:
    """The calls that the lines tell of."""
    return [_call(number, line) for number, line in enumerate(lines)]


def _call(client: int, line: str) -> Call:
    began, ended, *words = line.split()
    operation, reply = _parsed(*words)
    if ended == ".":
        return Call(client, operation, int(began))
    return Call(client, operation, int(began), int(ended), reply)


def _parsed(name: str, key: str, *rest: str) -> tuple[Operation, Reply]:
    at = key.encode()
    words = [*rest, "", ""]
    value, seq = _valued(words[0])
    match name:
        case "get":
            seen = Seen(value, seq) if rest else None
            return Operation(Kind.GET, (Get(at),)), Reply((seen,))
        case "put":
            return Operation(Kind.PUT, (Put(at, value),)), Reply((None,), seq)
        case "create":  # a put if absent; "refused" as the second word
            operation = Operation(Kind.PUT, (Put(at, value),), (Exists(at, wanted=False),))
            return operation, _outcome(words[1], seq)
        case "replace":  # a put if the number is that of the second word
            test = SeqIs(at, int(words[1]))
            return Operation(Kind.PUT, (Put(at, value),), (test,)), Reply((None,), seq)
        case "delete":
            return Operation(Kind.DELETE, (Delete(at),)), Reply((None,), seq)
        case "add":  # the delta, then the sum
            adds = Operation(Kind.ADD, (Add(at, int(words[0])),))
            return adds, Reply((int(words[1] or 0),))
        case _:
            raise AssertionError(name)


def _outcome(word: str, seq: int | None) -> Reply:
    return Reply(succeeded=False) if word == "refused" else Reply((None,), seq)


def _valued(word: str) -> tuple[bytes, int | None]:
    value, _, seq = word.partition("@")
    return value.encode(), int(seq) if seq else None
