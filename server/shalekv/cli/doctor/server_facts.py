"""Asks a server for what `shalekv.cli.doctor.server` judges."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shalekv.cli.console.connection import Target
from shalekv.cli.console.failures import FAIL_FAST
from shalekv.cli.doctor.diagnosis import Area, Diagnosis
from shalekv.cli.doctor.server import (
    Certificate,
    TimedStatus,
    area_of,
    judge_certificate,
    judge_database,
    judge_exposure,
    judge_lag,
    judge_server_clock,
    judge_state,
    judge_version,
)
from shalekv_client import (
    Client,
    PermissionDenied,
    ShaleKVError,
    Stats,
    Status,
    Unauthenticated,
    Unreachable,
    __version__,
)

if TYPE_CHECKING:  # of shalekv[server]
    from cryptography import x509

_UNIX = "unix:"


class ServerExamination:
    """The checks of one server. Each method makes one check, and may be cancelled."""

    def __init__(self, address: str, target: Target) -> None:
        """`target` has the credentials."""
        self.area: Area = area_of(address)
        self.address = address
        self._target = target
        is_unix = address.startswith(_UNIX)
        self._host = "unix" if is_unix else address.rpartition(":")[0].strip("[]")
        self.status: Status | None = None  # once `answers` has found it
        self.stats: Stats | None = None  # as `status`

    async def certificates(self) -> list[Diagnosis]:
        """Judge the certificates of the server and of the caller."""
        tls = self._target.tls
        if tls is None or self._host == "unix":
            return []
        from cryptography import x509  # noqa: PLC0415 (of shalekv[server])

        found = [await self._served_certificate()]
        if tls.certificate:
            data = await asyncio.to_thread(Path(tls.certificate).read_bytes)
            found.append(certificate_of("client", x509.load_pem_x509_certificate(data)))
        host = tls.server_name or self._host
        return [
            judged
            for each in found
            for judged in judge_certificate(self.area, each, now_ms=_now_ms(), host=host)
        ]

    async def _served_certificate(self) -> Certificate:
        """Read the certificate that the server shows. Nothing is sent to it, so none is trusted."""
        from cryptography import x509  # noqa: PLC0415 (of shalekv[server])

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        port = int(self.address.rpartition(":")[2])
        _, writer = await asyncio.open_connection(self._host, port, ssl=context)
        try:
            shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
            data = shown.getpeercert(binary_form=True) or b""
        finally:
            writer.transport.abort()
        return certificate_of("server", x509.load_der_x509_certificate(data))

    async def answers(self) -> list[Diagnosis]:
        """Call the server, and judge what it says of itself."""
        area = self.area
        found: list[Diagnosis] = []
        has_tls = self._target.tls is not None
        try:
            async with self._target.client(self.address, retry=FAIL_FAST) as client:
                caller = await client.who_am_i()
                found.append(area.ok("reachable", "it answers"))
                found += judge_exposure(area, self._host, caller, has_tls=has_tls)
                began_ms = _now_ms()
                status = await client.status()
                timed = TimedStatus(status, began_ms, _now_ms())
                self.status = status
                await self._read_stats(client)
        except PermissionDenied as error:
            fix = f"shalekv grant set PRINCIPAL --role ROLE --addr {self.address}    # as root"
            return [*found, area.unchecked("status", str(error), fix)]
        except ShaleKVError as error:
            return [*found, self._failed(error)]
        return [
            *found,
            judge_version(area, status, __version__),
            *judge_state(area, status),
            judge_server_clock(area, timed),
            *judge_lag(area, status),
        ]

    async def _read_stats(self, client: Client) -> None:
        try:
            self.stats = await client.stats()
        except ShaleKVError:  # for administrators alone, and only for the bundle
            self.stats = None

    def _failed(self, error: ShaleKVError) -> Diagnosis:
        flag = f"--addr {self.address}"
        if isinstance(error, Unauthenticated):
            fix = f"shalekv access whoami {flag} --token-file FILE"
            return self.area.problem("credentials", str(error), fix)
        if isinstance(error, Unreachable):
            fix = f"shalekv serve --listen {self.address} ...    # or correct --addr, --tls-ca"
            return self.area.problem("reachable", str(error), fix)
        return self.area.problem("reachable", str(error), f"shalekv health {flag}")

    def same_database(self, database_id: bytes, url: str) -> Sequence[Diagnosis]:
        """Judge whether the server serves this database. Call it after `answers`."""
        if self.status is None:
            return []
        return [judge_database(self.area, self.status, database_id, url)]


def certificate_of(owner: str, read: x509.Certificate) -> Certificate:
    """Return what is judged of a certificate."""
    from cryptography import x509  # noqa: PLC0415 (of shalekv[server])

    try:
        found = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*found.get_values_for_type(x509.DNSName)]
        names += map(str, found.get_values_for_type(x509.IPAddress))
    except x509.ExtensionNotFound:
        names = []
    return Certificate(
        owner,
        int(read.not_valid_before_utc.timestamp() * 1_000),
        int(read.not_valid_after_utc.timestamp() * 1_000),
        names,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
