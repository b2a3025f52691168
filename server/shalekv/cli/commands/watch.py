"""`shalekv watch`: print the commits to a range as they happen."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.options import RangeArguments, RangeFlags, prefix_and_range_options
from shalekv.cli.console.output import (
    Format,
    TablePrinter,
    data_format_option,
    print_json,
    print_line,
    printing,
)
from shalekv.cli.console.talking import talk
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

COLUMNS = ("seq", "change", "key", "value")
PREVIOUS = "previous"
UNKNOWN = "?"  # printed if the previous value is unknown

_HELP = """Print every commit to the keys that begin with PREFIX, or to a range, as it happens.

Prints whole commits in order, each once, from now on or from --from-seq on, until Ctrl-C. If the
server fails, the watch continues with another one of --addr, or with the same one when it is back.
At the end, stderr has the --from-seq with which to continue. --timeout-ms bounds the wait for a
server, not for commits.

With --consumer the server keeps what this consumer has not printed yet, for a day after its last
connection (server setting consumer_lease_ttl_s), and the next watch with this name continues there.
It may print the last commits again, because whole WAL objects are kept.

\b
raw    a line for each change: seq, put or delete or delete_range or expired, key, and the value,
       or the end of a deleted range; with --previous also the previous value
json   a line for each commit: {"seq": 7, "wal_id": 3, "changes": [{"kind": "put", "key": ...}]}

\b
Examples:
  shalekv watch user/
  shalekv watch --start a --end b --previous
  shalekv watch --format json --from-seq 42 | jq -c .changes[]
  shalekv watch orders/ --consumer billing --format json
  shalekv watch --limit 1                        wait for the next commit
"""


class EventPrinter:
    """Prints events of a watch: a line for each change, or a JSON object for each commit."""

    def __init__(
        self,
        encoding: Encoding,
        output_format: Format,
        *,
        has_previous: bool,
        shows_progress: bool,
    ) -> None:
        """`has_previous`: the previous values were requested."""
        self._encoding = encoding
        self._format = output_format
        self._has_previous = has_previous
        self._shows_progress = shows_progress
        columns = (*COLUMNS, PREVIOUS) if has_previous else COLUMNS
        self._table = TablePrinter(columns)

    def print(self, event: WatchEvent) -> None:
        """Print a commit, or a progress event if those are wanted."""
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

    def _print_rows(self, rows: Sequence[Sequence[str | int]]) -> None:
        if self._format is Format.TABLE:
            self._table.print(rows)
        else:
            for row in rows:
                print_line("\t".join(map(str, row)))

    def _rows(self, commit: WatchCommit) -> Iterator[Sequence[str | int]]:
        encode = self._encoding.encode
        for change in commit.changes:
            is_range = change.kind is ChangeKind.DELETE_RANGE
            second = encode(change.end if is_range else change.value)
            before = encode(change.previous.value) if change.previous else ""
            before = UNKNOWN if change.previous_unknown else before
            yield self._row(commit.seq, _kind(change), encode(change.key), second, before)

    def _row(self, seq: int, kind: str, key: str, value: str, before: str) -> Sequence[str | int]:
        row = (seq, kind, key, value)
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
        return {PREVIOUS: {**value, "seq": before.seq, "expire_at_ms": before.expire_at_ms}}


def _kind(change: WatchChange) -> str:
    return change.kind.name.lower() if change.kind is not None else "unknown"


@dataclass(frozen=True, slots=True)
class _WatchOptions:
    """The range and the options of the watch."""

    key_range: RangeArguments
    from_seq: int
    previous: bool
    consumer: str
    limit: int | None


@click.command(help=_HELP, epilog=exit_codes_of_calls(until_interrupted=True))
@prefix_and_range_options
@click.option(
    "--from-seq",
    type=click.IntRange(min=1),
    metavar="SEQ",
    help="Start at this commit, if it is still in the WAL; a later one is waited for.  "
    "[default: the next one]",
)
@click.option("--previous", is_flag=True, help="Also print the value that each change replaced.")
@click.option("--consumer", default="", metavar="NAME", help="Keep the WAL for this consumer.")
@click.option("--limit", type=click.IntRange(min=1), metavar="COUNT", help="End after this many.")
@click.option("--progress", is_flag=True, help="Also print progress while the watch is idle.")
@encoding_options
@data_format_option
@target_options
def watch(  # noqa: PLR0913 (click passes each option by its name)
    *,
    key_range: RangeFlags,
    from_seq: int | None,
    previous: bool,
    consumer: str,
    limit: int | None,
    progress: bool,
    encoding: Encoding,
    output_format: Format,
    target: Target,
) -> None:
    """Print commits until --limit or Ctrl-C."""
    keys = key_range.decoded(encoding)
    options = _WatchOptions(keys, from_seq or 0, previous, consumer, limit)
    printer = EventPrinter(encoding, output_format, has_previous=previous, shows_progress=progress)
    run = _WatchRun(options, printer)
    try:
        with printing():
            talk(target, run.follow)
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        run.print_continuation()


class _WatchRun:
    """A watch across restarts of its stream: prints events, and keeps the next position."""

    def __init__(self, options: _WatchOptions, printer: EventPrinter) -> None:
        self._options = options
        self._printer = printer
        self._next_seq = options.from_seq  # after the last printed event; 0: unknown
        self._left = options.limit

    async def follow(self, client: Client) -> None:
        """Print events until the limit is reached."""
        while True:
            try:
                async with client.watch(
                    **self._options.key_range,
                    from_seq=self._next_seq,
                    previous=self._options.previous,
                    consumer=self._options.consumer,
                ) as events:
                    self._note_wait(client)
                    self._next_seq = events.next_seq
                    while self._left != 0:
                        await self._print_more(events)
                return
            except WatchTooSlow:
                pass  # the reader of the output was: continue after what is printed
            except WalCollected:
                self._next_seq = 0  # it is not possible to continue from there
                raise

    def _note_wait(self, client: Client) -> None:
        """Say on stderr that nothing comes for now: the watch begins after the newest commit."""
        seq = client.fleet.freshness.seq  # of the reply that has opened the watch
        if self._next_seq > seq + 1:
            wait = f"The newest commit is seq {seq}: waiting for seq {self._next_seq}."
            click.echo(wait, err=True)

    def print_continuation(self) -> None:
        """Print on stderr with which option to continue."""
        if self._next_seq:
            click.echo(f"To continue: --from-seq {self._next_seq}", err=True)

    async def _print_more(self, events: Watch) -> None:
        for event in await events.read():
            if self._left == 0:
                break
            self._printer.print(event)
            sys.stdout.flush()
            self._next_seq = event.seq + 1
            if self._options.consumer:
                events.ack(event.seq)
            if self._left is not None and isinstance(event, WatchCommit):
                self._left -= 1
