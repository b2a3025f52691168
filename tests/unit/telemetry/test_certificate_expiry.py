"""When the files of TLS expire, as metrics tell it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from shalekv.settings.security import TlsSettings
from shalekv.telemetry.certificate_expiry import CertificateExpiry
from shalekv.telemetry.metrics import Metrics
from tests.kit.certificates import LOCAL, Authority

DAY_S = 86_400


def in_days(expiry: CertificateExpiry, path: Path) -> float | None:
    """In how many days a file expires; None: that is not told."""
    metrics = Metrics()
    expiry.collect(metrics)
    found = metrics.get("certificate_expiry_timestamp_seconds", str(path))
    if found is None:
        return None
    assert isinstance(found, float)
    return round((found - datetime.now(UTC).timestamp()) / DAY_S)


def test_the_first_certificate_that_is_needed_counts(tmp_path: Path) -> None:
    """Of a chain that is the first that expires; of authorities the first that has not yet."""
    chain, key, authorities = (tmp_path / name for name in ("chain", "key", "authorities"))
    first, second, old = (Authority(valid=(-9, end)) for end in (40, 20, -1))
    chain.write_bytes(first.issue(*LOCAL, valid=(-1, 9)).certificate + first.certificate)
    authorities.write_bytes(old.certificate + second.certificate + first.certificate)
    expiry = CertificateExpiry(
        TlsSettings(tls_cert=str(chain), tls_key=str(key), tls_client_ca=str(authorities))
    )
    assert in_days(expiry, chain) == 9
    assert in_days(expiry, authorities) == 20
    chain.write_bytes(first.issue(*LOCAL, valid=(-1, 30)).certificate)
    assert in_days(expiry, chain) == 30
    authorities.write_bytes(old.certificate)
    assert in_days(expiry, authorities) == -1
    chain.write_bytes(b"-----BEGIN CERTIFICATE-----\nhalf")
    authorities.unlink()
    assert in_days(expiry, chain) is None
    assert in_days(expiry, authorities) is None
