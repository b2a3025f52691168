"""The lines of `shalekv top`: one for each server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from shalekv.cli.measures import US_PER_MS, rate, size, time
from shalekv.cli.top_rates import Between
from shalekv_client import Status

WIDE_COLUMNS = 110  # of a terminal, for all that there is to say of a server
_COLUMNS = (
    *("server", "role", "epoch", "seq", "behind", "stale", "state"),
    *("calls/s", "failed/s", "p50", "p99", "memory", "watches"),
)
_LESS_IMPORTANT = frozenset({"epoch", "failed/s", "p50", "memory", "watches"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A server as it was seen twice; `after` is None when it does not answer."""

    address: str
    before: Status | None
    after: Status | None
    problem: str = ""  # why it does not answer


class ServerLines:
    """A line for each server, of as many columns as the terminal has room for."""

    def __init__(self, servers: Sequence[Seen]) -> None:
        self._servers = servers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table."""
        del console
        columns = [
            name
            for name in _COLUMNS
            if options.max_width >= WIDE_COLUMNS or name not in _LESS_IMPORTANT
        ]
        table = plain_table(*columns, texts=("server", "role", "state"))
        answering = [each.after for each in self._servers if each.after is not None]
        newest = max((status.view.seq for status in answering), default=0)
        for each in self._servers:
            cells = _server_cells(each, newest)
            table.add_row(*(cells.get(name, "-") for name in columns))
        yield table


def _server_cells(seen: Seen, newest_seq: int) -> dict[str, str | Text]:
    status = seen.after
    if status is None:
        return {"server": Text(seen.address), "state": Text("no answer", style="red")}
    calls = Between(seen.before, status).all_calls()
    return {
        "server": Text(seen.address),
        "role": role_of(status),
        "epoch": f"{status.view.epoch:,}",
        "seq": f"{status.view.seq:,}",
        "behind": f"{newest_seq - status.view.seq:,}",
        "stale": time(status.view.staleness_ms * US_PER_MS),
        "state": _state(status),
        "calls/s": rate(calls.calls),
        "failed/s": alarming(calls.failures),
        "p50": time(calls.p50_us),
        "p99": time(calls.p99_us),
        "memory": size(status.memory.bytes),
        "watches": f"{status.watches.watches:,}" if status.watches else "-",
    }


def role_of(status: Status) -> str:
    """The role of a process, in a word."""
    return status.view.role.name.lower() if status.view.role else "?"


def _state(status: Status) -> Text:
    reader = status.reader
    failing = {
        calls
        for calls, each in (("reads", status.read_readiness), ("writes", status.write_readiness))
        if each is not None and not each.is_ready
    }
    if failing:
        return Text("fails" if len(failing) > 1 else f"{failing.pop()} fail", style="red")
    if reader is None:
        return Text("serves" if status.writer else "-")
    state = reader.state.name.lower().replace("_", " ") if reader.state else "?"
    return Text(state, style="" if state == "following" else "yellow")


def plain_table(*columns: str, texts: Sequence[str] | None = None) -> Table:
    """Without rows. Columns hold numbers, but for `texts`: the first alone, when left out."""
    table = Table(box=None, header_style="bold cyan", pad_edge=False)
    table.caption_justify = "left"
    for name in columns:
        is_text = name in (columns[:1] if texts is None else texts)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def alarming(value: float) -> Text:
    """A rate that should be none."""
    return Text(rate(value), style="red" if value else "")
