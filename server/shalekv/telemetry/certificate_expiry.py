"""When the certificates in the files of TLS expire, for metrics.

A file is read again when it has changed. Of the certificate of this process the first that expires
counts, since the whole chain is needed. Files of authorities keep old ones for a while: of them the
first counts that has not expired yet; of a file whose authorities all have, the last.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509

from shalekv.settings.security import TlsSettings
from shalekv.telemetry.metrics import Metrics


class CertificateExpiry:
    """The files of a process, and what was in them when they were read last."""

    def __init__(self, tls: TlsSettings) -> None:
        """Read nothing yet."""
        self._certificate = tls.tls_cert
        self._authorities = {tls.tls_client_ca, tls.tls_server_ca} - {""}
        self._read: dict[str, tuple[object, list[float]]] = {}  # by file: its state, and the times

    def collect(self, metrics: Metrics) -> None:
        """Add when each file expires; one that cannot be read has no sample."""
        if self._certificate and (times := self._times(self._certificate)):
            metrics.add(_NAME, min(times), self._certificate)
        now_s = time.time()
        for path in self._authorities:
            if times := self._times(path):
                ahead = [each for each in times if each > now_s]
                metrics.add(_NAME, min(ahead, default=max(times)), path)

    def _times(self, path: str) -> list[float]:
        try:
            seen = Path(path).stat()
            state = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)
            known = self._read.get(path)
            if known is None or known[0] != state:
                known = self._read[path] = (state, _times_in(Path(path).read_bytes()))
        except OSError:
            return []
        return known[1]


def _times_in(pem: bytes) -> list[float]:
    try:
        certificates = x509.load_pem_x509_certificates(pem)
        return [each.not_valid_after_utc.timestamp() for each in certificates]
    except ValueError:  # a half of it is written; the state will be another one
        return []


_NAME = "certificate_expiry_timestamp_seconds"
