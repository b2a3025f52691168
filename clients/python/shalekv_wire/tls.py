"""TLS of both sides: contexts made of files that are read again when they change.

A context is made for each new connection from the newest files that could be used together. Those
that cannot, because a half of a pair is not replaced yet or is damaged, are logged once, and the
last good ones stay in use. Connections that exist keep theirs. Versions are TLS 1.2 and later, and
ALPN must choose `h2`.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass

ALPN = "h2"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; an empty path means that there is none.

    `certificate` and `key` are of this side: both or neither. `authority` has the certificates of
    the authorities by which the other side is verified. A server without it asks clients for no
    certificate; a client without it trusts the authorities of the system.
    """

    certificate: str = ""
    key: str = ""
    authority: str = ""


class TlsContexts:
    """The context for the next connection of one side."""

    def __init__(self, files: TlsFiles, *, is_server: bool) -> None:
        """Read the files.

        Raises:
            OSError: a file cannot be read.
            ssl.SSLError: they are not PEM, or do not belong together.
            ValueError: there is a certificate without a key, or a key without a certificate; or a
                server without both.
        """
        self._files = files
        self._is_server = is_server
        self._digest = b""
        raise NotImplementedError

    def current(self) -> ssl.SSLContext:
        """Return the context of the newest files that are good.

        Looks at the files at most once a second.
        """
        raise NotImplementedError
