"""`shalekv txn`: compare, then do, in one commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import click

from shalekv.cli.console.connection import (
    ClientExit,
    Target,
    durability_option,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.txn_notation import (
    NotationError,
    Script,
    parse_compares,
    parse_operations,
    parse_script,
)
from shalekv_client import (
    Add,
    Client,
    Delete,
    DeleteRange,
    Durability,
    Get,
    Put,
    TxnOperation,
    TxnResult,
    Value,
)

COLUMNS = ("operation", "key", "value", "seq")

_HELP = """Compare, then do one of two lists of operations; all of it in one commit.

When all comparisons hold (--if), the operations of --then are done, otherwise those of --else.
The exit code is 0 for then and 13 for else, and the output begins with the branch.

\b
Comparisons:                          Operations:
  exists KEY                            get KEY        before this transaction
  missing KEY                           put KEY VALUE  [--ttl 10m]
  seq KEY = 12      (= != < >)          add KEY -3     (1 without a number)
  value KEY = VALUE (= != < >)          delete KEY
  empty --prefix KEY                    delete --prefix KEY
  empty --start KEY --end KEY           delete --start KEY --end KEY

Words are split as a shell does: blanks, and the backslashes of --escaped, stand in quotes. FILE
(- is standard input) has one on each line: comparisons, an empty line, operations, an empty line,
operations of the else branch; lines that begin with # are comments. What the options add comes
behind what FILE has. Transactions do not nest.

\b
Examples:
  shalekv txn --if 'missing lock' --then 'put lock me --ttl 30s' --else 'get lock'
  shalekv txn --if 'seq config = 12' --then 'put config "a b"' --then 'add config/edits'
  shalekv txn --then 'get a' --then 'get b'             two keys at one moment
  shalekv txn examples/reserve_seat.txn --format json
  shalekv txn --escaped --if 'exists "row\\x00"' --then 'delete "row\\x00"'
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("file", type=click.File(encoding="utf-8", errors="surrogateescape"), required=False)
@click.option("--if", "compares", multiple=True, metavar="COMPARISON", help="What must hold.")
@click.option("--then", multiple=True, metavar="OPERATION", help="What is done when all hold.")
@click.option("--else", "otherwise", multiple=True, metavar="OPERATION", help="What otherwise.")
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
    """Do it, and print the branch and the results."""
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

    async def call(client: Client) -> TxnResult:
        return await client.txn(
            script.compares, script.then, script.otherwise, durability=durability
        )

    found = talk(target, call, mutates=True)
    with printing():
        done = script.then if found.succeeded else script.otherwise
        _print(done, found, encoding, output_format)
    if not found.succeeded:
        raise SystemExit(ClientExit.CONDITION)


def _print(
    done: Sequence[TxnOperation],
    found: TxnResult,
    encoding: Encoding,
    output_format: Format,
) -> None:
    branch = "then" if found.succeeded else "else"
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
    print_line(
        f"{branch}\t{found.seq}" if output_format is Format.RAW else f"{branch}, seq {found.seq}"
    )
    if results:
        print_rows(output_format, COLUMNS, (_row(*result, encoding) for result in results))


def _places(option: str, lines: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((option, line) for line in lines)


def _row(
    operation: TxnOperation, result: Value | int | None, encoding: Encoding
) -> tuple[str | int | None, ...]:
    """The cells of `COLUMNS`."""
    name, target = _named(operation)
    spelled = " ".join(
        encoding.encode(word) if at == "key" else f"--{at} {encoding.encode(word)}"
        for at, word in target.items()
    )
    match result:
        case Value():
            return (name, spelled, encoding.encode(result.value), str(result.seq))
        case _:
            return (name, spelled, None if result is None else str(result), None)


def _record(operation: TxnOperation, result: Value | int | None, encoding: Encoding) -> Record:
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
    return record


def _named(operation: TxnOperation) -> tuple[str, dict[str, bytes]]:
    """What an operation is called, and what it is done to."""
    match operation:
        case Get(key):
            return "get", {"key": key}
        case Put(key):
            return "put", {"key": key}
        case Add(key):
            return "add", {"key": key}
        case Delete(key):
            return "delete", {"key": key}
        case DeleteRange(start, end, prefix):
            ends = {"start": start, "end": end, "prefix": prefix}
            return "delete", {at: word for at, word in ends.items() if word}
