"""`shalekv watch`: every commit to a range, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, talk, target_options
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options, json_field
from shalekv.cli.console.options import RangeArguments, RangeWords, range_options
from shalekv.cli.console.output import (
    Format,
    TablePrinter,
    format_option,
    print_json,
    print_line,
    printing,
)
from shalekv_client import (
    ChangeKind,
    Client,
    WalCollected,
    Watch,
    WatchChange,
    WatchCommit,
    WatchEvent,
    WatchTooSlow,
)

# --- watch_printing
# How events of a watch are printed: a line for each change, or one object for each commit.


COLUMNS = ("seq", "change", "key", "value")
PREVIOUS = "previous"
UNKNOWN = "?"  # a value before that nobody knows


class EventPrinter:
    """Prints events one by one."""

    def __init__(
        self,
        encoding: Encoding,
        output_format: Format,
        *,
        has_previous: bool,
        shows_progress: bool,
    ) -> None:
        """`has_previous`: the values before were asked for."""
        self._encoding = encoding
        self._format = output_format
        self._has_previous = has_previous
        self._shows_progress = shows_progress
        columns = (*COLUMNS, PREVIOUS) if has_previous else COLUMNS
        self._table = TablePrinter(columns)

    def print(self, event: WatchEvent) -> None:
        """Print a commit, or how far all was told if that is wanted."""
        if isinstance(event, WatchCommit):
            self._print_commit(event)
        elif self._shows_progress:
            if self._format is Format.JSON:
                print_json({"progress_seq": event.seq})
            else:
                self._print_rows([self._row(event.seq, "progress", "", "", "")])

    def _print_commit(self, commit: WatchCommit) -> None:
        if self._format is Format.JSON:
            changes = [self._record(change) for change in commit.changes]
            print_json({"seq": commit.seq, "wal_id": commit.wal_id, "changes": changes})
        else:
            self._print_rows(list(self._rows(commit)))

    def _print_rows(self, rows: Sequence[Sequence[str]]) -> None:
        if self._format is Format.TABLE:
            self._table.print(rows)
        else:
            for row in rows:
                print_line("\t".join(row))

    def _rows(self, commit: WatchCommit) -> Iterator[Sequence[str]]:
        spell = self._encoding.encode
        for change in commit.changes:
            is_range = change.kind is ChangeKind.DELETE_RANGE
            second = spell(change.end if is_range else change.value)
            before = spell(change.previous.value) if change.previous else ""
            before = UNKNOWN if change.previous_unknown else before
            yield self._row(commit.seq, _kind(change), spell(change.key), second, before)

    def _row(self, seq: int, kind: str, key: str, value: str, before: str) -> Sequence[str]:
        row = (str(seq), kind, key, value)
        return (*row, before) if self._has_previous else row

    def _record(self, change: WatchChange) -> dict[str, Any]:
        encoding = self._encoding
        record: dict[str, Any] = {
            "kind": _kind(change),
            **json_field("key", change.key, encoding),
        }
        if change.kind is ChangeKind.DELETE_RANGE:
            record |= json_field("end", change.end, encoding)
        if change.kind is ChangeKind.PUT:
            record |= json_field("value", change.value, encoding)
        if change.kind in {ChangeKind.PUT, ChangeKind.EXPIRED}:
            record["expire_at_ms"] = change.expire_at_ms
        if self._has_previous and change.kind is not ChangeKind.DELETE_RANGE:
            record |= self._before(change)
        return record

    def _before(self, change: WatchChange) -> dict[str, Any]:
        if change.previous_unknown:
            return {"previous_unknown": True}
        before = change.previous
        if before is None:
            return {PREVIOUS: None}
        value = json_field("value", before.value, self._encoding)
        told = {**value, "seq": before.seq, "expire_at_ms": before.expire_at_ms}
        return {PREVIOUS: told}


def _kind(change: WatchChange) -> str:
    return change.kind.name.lower() if change.kind is not None else "unknown"


# --- watch


_HELP = """Print every commit to the keys that begin with PREFIX, or to a range, as it comes.

Whole commits in their order, each once, from now on or from --from-seq on, until Ctrl-C. When the
server goes away, another one of --addr, or the same when it is back, goes on where it was. On
stderr stands at the end how to go on: --from-seq.

With --consumer the server keeps what this consumer has not printed yet, for a day after it was last
here (server setting consumer_lease_ttl_s), and the next one with this name goes on there. It may
print the last commits once more: what is kept are whole objects of the WAL.

\b
raw    a line for each change: seq, put or delete or delete_range or expired, key, and the value,
       or the end of a deleted range; with --previous the value before
json   a line for each commit: {"seq": 7, "wal_id": 3, "changes": [{"kind": "put", "key": ...}]}

\b
Examples:
  shalekv watch user/
  shalekv watch --start a --end b --previous
  shalekv watch --format json --from-seq 42 | jq -c .changes[]
  shalekv watch orders/ --consumer billing --format json
  shalekv watch --limit 1                        wait for the next commit
"""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What to watch, and how much of it."""

    key_range: RangeArguments
    from_seq: int
    previous: bool
    consumer: str
    limit: int | None


@click.command(help=_HELP, epilog=exit_codes_of_calls(until_interrupted=True))
@click.argument("prefix_word", metavar="[PREFIX]", required=False, default="")
@range_options
@click.option(
    "--from-seq",
    type=click.IntRange(min=1),
    metavar="SEQ",
    help="Begin with this commit, if it is still in the WAL.  [default: the next one]",
)
@click.option("--previous", is_flag=True, help="Also print the value that each change replaced.")
@click.option("--consumer", default="", metavar="NAME", help="Keep the WAL for this consumer.")
@click.option("--limit", type=click.IntRange(min=1), metavar="COUNT", help="End after so many.")
@click.option("--progress", is_flag=True, help="Also print how far all was told, when idle.")
@encoding_options
@format_option
@target_options
def watch(  # noqa: PLR0913 (click passes each option by its name)
    *,
    prefix_word: str,
    key_range: RangeWords,
    from_seq: int | None,
    previous: bool,
    consumer: str,
    limit: int | None,
    progress: bool,
    encoding: Encoding,
    output_format: Format,
    target: Target,
) -> None:
    """Print commits until the end."""
    if prefix_word and key_range.is_given:
        raise click.UsageError("PREFIX excludes --prefix, --start and --end")
    keys = key_range.decoded(encoding)
    if prefix_word:
        keys["prefix"] = argument_bytes(encoding, prefix_word, "PREFIX")
    wanted = _Wanted(keys, from_seq or 0, previous, consumer, limit)
    printer = EventPrinter(encoding, output_format, has_previous=previous, shows_progress=progress)
    run = _WatchProgress(wanted, printer)
    try:
        with printing():
            talk(target, run.follow)
    except KeyboardInterrupt:
        pass  # this is how it ends
    finally:
        run.tell_how_to_go_on()


class _WatchProgress:
    """How far the watch has come."""

    def __init__(self, wanted: _Wanted, printer: EventPrinter) -> None:
        self._wanted = wanted
        self._printer = printer
        self._next_seq = wanted.from_seq  # behind what was printed; 0: not known
        self._left = wanted.limit

    async def follow(self, client: Client) -> None:
        """Print all that comes, until there was enough."""
        while True:
            try:
                async with client.watch(
                    **self._wanted.key_range,
                    from_seq=self._next_seq,
                    previous=self._wanted.previous,
                    consumer=self._wanted.consumer,
                ) as events:
                    self._next_seq = events.next_seq
                    while self._left != 0:
                        await self._print_more(events)
                return
            except WatchTooSlow:
                pass  # whoever reads what is printed was: go on behind what is printed
            except WalCollected:
                self._next_seq = 0  # there is no way to go on from there
                raise

    def tell_how_to_go_on(self) -> None:
        """Say on stderr what prints the rest."""
        if self._next_seq:
            click.echo(f"To go on: --from-seq {self._next_seq}", err=True)

    async def _print_more(self, events: Watch) -> None:
        for event in await events.read():
            if self._left == 0:
                break
            self._printer.print(event)
            sys.stdout.flush()
            self._next_seq = event.seq + 1
            if self._wanted.consumer:
                events.ack(event.seq)
            if self._left is not None and isinstance(event, WatchCommit):
                self._left -= 1
