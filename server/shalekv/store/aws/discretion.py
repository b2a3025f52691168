"""Keeps secrets out of logs and of errors."""

from __future__ import annotations

import logging
import re

_TOKEN = re.compile(r"[A-Za-z0-9+/=_%-]{16,}")  # may be a key, a signature or a part of a query
_MESSAGE_CHARACTERS = 200


def keep_secrets_out_of_logs() -> None:
    """Below INFO, botocore logs requests with their signatures and tokens: that is never wanted.

    Nor is what it says of credentials at INFO, in each process: that it has found some. And the
    traceback of a source that failed ends with whatever that has said.
    """
    for name in ("botocore", "aiobotocore"):
        for logger, least in (
            (logging.getLogger(name), logging.INFO),
            (logging.getLogger(f"{name}.credentials"), logging.WARNING),
        ):
            if logger.getEffectiveLevel() < least:
                logger.setLevel(least)
        logging.getLogger(f"{name}.credentials").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def masked(message: str) -> str:
    """The beginning of what a server says, without what may be a secret."""
    return _TOKEN.sub("***", message)[:_MESSAGE_CHARACTERS]


def named(error: Exception) -> str:
    """The kind of an error; its text may hold what a URL or a process has said."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
