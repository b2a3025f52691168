"""`shalekv get`: print the value of a key."""

from __future__ import annotations

import click

from shalekv.cli.console.connection import ClientExit, Target, exit_codes_of_calls, target_options
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.keys import (
    Encoding,
    argument_bytes,
    encoding_options,
    json_field,
    printable,
)
from shalekv.cli.console.options import ReadOptions, cost_option, read_options
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_bytes,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv_client import Value
from shalekv_client.one_call import OneCallClient

_BLANKS = str.maketrans(dict.fromkeys("\n\t\r", " "))  # parts of a text, though not printable

_HELP = """Print the value of KEY.

If the key has no value, the exit code is 1, with a message on stderr.

Without --format the value is printed on a line, with unprintable characters escaped. A value of 8
bytes that is no text is printed as the number of a counter. The format raw prints the exact bytes;
table and json include the sequence number and the expiry, json also the number as "counter".

\b
Examples:
  shalekv get greeting
  shalekv get --hex 00ff                  a key of two bytes; the value is printed in hex
  shalekv get --escaped 'row\\x00\\x01'     a key with escapes; the value is escaped, too
  shalekv get logo --format raw > a.png   the exact bytes of the value
  shalekv get greeting --format json      with sequence number and expiry
  shalekv get hits                        the number of a counter, as written by `shalekv add`
  shalekv get hits --as-int64             the same; an error if it is no counter
  shalekv get greeting --cost             what it has cost, on stderr
  shalekv get greeting --snapshot nightly the value at a snapshot
  shalekv get greeting --addr 10.0.0.6:7654,10.0.0.7:7654 --max-staleness 2s
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@click.option("--as-int64", is_flag=True, help="Print the value as the number of a counter.")
@encoding_options
@brief_format_option("the value on a line")
@read_options
@cost_option
@target_options
def get(
    *,
    key: str,
    as_int64: bool,
    encoding: Encoding,
    output_format: Format | None,
    reading: ReadOptions,
    tells_cost: bool,
    target: Target,
) -> None:
    """Print the value, or end with exit code 1."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(once: OneCallClient) -> Value | None:
        client, arguments = await reading.for_call(once)
        return await client.get(wanted, **arguments)

    found = talk_once(target, call, tells_cost=tells_cost)
    if found is None:
        click.echo(f"not found: {encoding.encode(wanted)}", err=True)
        raise SystemExit(ClientExit.NOT_FOUND)
    if as_int64:
        _check_counter(found)
    with printing():
        _print(wanted, found, encoding, output_format, as_int64=as_int64)


def counter_of(found: Value) -> int | None:
    """Return the number of a value that looks like a counter; None if it is something else.

    A counter has 8 bytes. A text of 8 bytes is taken for a text.
    """
    try:
        number = found.as_int()
    except ValueError:
        return None
    try:
        is_text = found.value.decode("utf-8").translate(_BLANKS).isprintable()
    except UnicodeDecodeError:
        return number
    return None if is_text else number


def counter_field(found: Value) -> dict[str, int]:
    """Return the member of a JSON object with the number of a counter; of others, nothing."""
    counter = counter_of(found)
    return {} if counter is None else {"counter": counter}


def _check_counter(found: Value) -> None:
    try:
        found.as_int()
    except ValueError as error:
        click.echo(f"Error: --as-int64: {error}", err=True)
        raise SystemExit(ExitCode.USAGE) from None


def _print(
    key: bytes,
    found: Value,
    encoding: Encoding,
    output_format: Format | None,
    *,
    as_int64: bool,
) -> None:
    counter = found.as_int() if as_int64 else counter_of(found)
    is_number = counter is not None and (as_int64 or encoding is Encoding.TEXT)
    formatted = str(counter) if is_number else encoding.encode(found.value)
    match output_format:
        case None if encoding is Encoding.TEXT and not is_number:
            print_line(printable(found.value, keep="\n\t"))
        case None:
            print_line(formatted)
        case Format.RAW:
            print_bytes(formatted.encode() if as_int64 else found.value)
        case Format.JSON:
            value = json_field("value", found.value, encoding)
            print_json(
                {
                    **json_field("key", key, encoding),
                    **({"value": counter} if as_int64 else value),
                    **({} if as_int64 else counter_field(found)),
                    "seq": found.seq,
                    "expire_at_ms": found.expire_at_ms,
                }
            )
        case Format.TABLE:
            columns = ("key", "value", "seq", "expire_at_ms")
            row = (encoding.encode(key), formatted, found.seq, found.expire_at_ms)
            print_rows(Format.TABLE, columns, [row])
