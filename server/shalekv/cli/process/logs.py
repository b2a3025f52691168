"""Logging to stderr: lines for people, or JSON objects with timestamp, level and event.

Log records of libraries that use `logging` get the same format.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import click
import structlog
from structlog.typing import Processor

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.errors import ShaleError
from shalekv.settings import LogFormat, LogLevel

# Of a process that was started wrongly: whoever has typed the command reads why on a plain line.
_STARTED_WRONGLY = frozenset({ExitCode.USAGE, ExitCode.DATABASE_NOT_FOUND, ExitCode.ADDRESS_IN_USE})
_CONTROL = {n: f"\\u{n:04x}" for n in (*range(32), *range(127, 160), 0x2028, 0x2029)}


def configure_logs(
    log_format: LogFormat, log_level: LogLevel, *, role: str = "", process: int = 0
) -> None:
    """Send every log line of this process to stderr in one format.

    `role` is added to each line; leave it empty for the writer. So is `process`, the number of one
    of several processes, unless it is 0. Child processes share the stderr of their parent.
    """
    names: dict[str, str | int] = {"role": role} if role else {}
    if process:
        names["process"] = process
    of_any_line: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(names),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=of_any_line,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_rendering(log_format),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level.value.upper())
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *of_any_line,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def report_end(error: Exception, code: ExitCode, log_format: LogFormat) -> None:
    """Report the error that ends the process: a log line, or a plain one for a wrong start."""
    ended = structlog.get_logger(__name__).bind(exit_code=code.value)
    if isinstance(error, ShaleError):
        reason, problem = error.reason, str(error)
    elif code is ExitCode.ADDRESS_IN_USE and isinstance(error, OSError):
        reason = code.name
        problem = f"{error.strerror}: stop what listens there, or give another address"
    else:
        ended.exception("ended by an unexpected error")
        return
    # The message is complete: a traceback would only hide it.
    if code in _STARTED_WRONGLY and log_format is LogFormat.CONSOLE:
        click.echo(f"Error: {problem}", err=True)
    else:
        ended.error("ended by an error", reason=reason, problem=problem)


def _rendering(log_format: LogFormat) -> Sequence[Processor]:
    """The processors that render text. Tracebacks omit variables, which may hold user data."""
    if log_format is LogFormat.JSON:
        return [structlog.processors.format_exc_info, _ordered, structlog.processors.JSONRenderer()]
    return [
        _escaped,
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _named(names: Mapping[str, str | int]) -> Processor:
    def add(
        _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event.update(names)
        return event

    return add


def _escaped(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape what would end a line, or change the terminal: texts of clients may be in a line."""
    return {
        key: value.translate(_CONTROL) if isinstance(value, str) and key != "exception" else value
        for key, value in event.items()
    }


def _ordered(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Put the three keys that every line has first."""
    return {key: event.pop(key) for key in ("timestamp", "level", "event")} | dict(event)
