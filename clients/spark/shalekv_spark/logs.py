"""Where warnings of this library go: a program that uses it decides that, and not stdout.

The engine logs by structlog, which prints to stdout where nobody has configured it. Then what
modules of ShaleKV log goes to `logging`, under their names; what others log is printed as before.
"""

from __future__ import annotations

import logging

import structlog
from structlog.typing import EventDict, ProcessorReturnValue, WrappedLogger

_OWN = frozenset({"shalekv", "shalekv_client", "shalekv_spark"})
_OF_LOGGING = ("timestamp", "level")  # its handlers tell them


def route_logs() -> None:
    """Route them, unless the program has configured structlog, which it also may do later."""
    if structlog.is_configured():
        return
    config = structlog.get_config()
    *steps, printed = config["processors"]
    print_logger = config["logger_factory"]
    of_module = structlog.stdlib.LoggerFactory(ignore_frame_names=[__name__])

    def logger(*arguments: object) -> WrappedLogger:
        found = of_module()
        return found if found.name.partition(".")[0] in _OWN else print_logger(*arguments)

    def rendered(logger: WrappedLogger, method: str, event: EventDict) -> ProcessorReturnValue:
        if isinstance(logger, logging.Logger):
            return _told(event)
        shown: ProcessorReturnValue = printed(logger, method, event)
        return shown

    structlog.configure(processors=[*steps, rendered], logger_factory=logger)


def _told(event: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """What a logger of `logging` is called with."""
    what, cause = event.pop("event"), event.pop("exc_info", None)
    fields = [f"{name}={value!r}" for name, value in event.items() if name not in _OF_LOGGING]
    return (": ".join([str(what), *([", ".join(fields)] if fields else [])]),), {"exc_info": cause}
