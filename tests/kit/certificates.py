"""Authorities and certificates for tests, and the files that `TlsFiles` name."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from shalekv_wire.tls import TlsFiles

PASSWORD = b"not empty"
LOCAL = ("localhost", "127.0.0.1", "::1")
_CERTIFICATES_ALONE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> TlsFiles:
        """Write NAME.crt and NAME.key."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        paths[0].write_bytes(self.certificate)
        paths[1].write_bytes(self.key)
        return TlsFiles(certificate=str(paths[0]), key=str(paths[1]))

    @property
    def der(self) -> bytes:
        """The certificate as the other side gets it."""
        return x509.load_pem_x509_certificate(self.certificate).public_bytes(Encoding.DER)

    def with_password(self) -> Pair:
        """Return the same with a key that needs a password."""
        key = _loaded(self.key)
        protected = key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD)
        )
        return Pair(self.certificate, protected)


class Authority:
    """An authority with a certificate of its own."""

    def __init__(
        self,
        name: str = "authority for tests",
        *,
        under: Authority | None = None,
        signs_lists: bool = True,
        valid: tuple[float, float] = (-1, 365),
    ) -> None:
        """Make a key and a certificate, which another authority may have issued."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        issuer = (self if under is None else under).signs_as
        builder = _builder(self._name, issuer[0], self._key, valid=valid)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        if not signs_lists:
            builder = builder.add_extension(_CERTIFICATES_ALONE, critical=True)
        self.certificate = _signed(builder, issuer[1])

    @property
    def signs_as(self) -> tuple[x509.Name, ec.EllipticCurvePrivateKey]:
        """Its name and its key."""
        return self._name, self._key

    def write(self, folder: Path, name: str = "ca") -> str:
        """Write NAME.crt; returns its path."""
        path = folder / f"{name}.crt"
        path.write_bytes(self.certificate)
        return str(path)

    def revoke(
        self,
        *certificates: bytes,
        valid: tuple[float, float] = (-1, 30),
        critical: Sequence[x509.ExtensionType] = (),
        of_entries: Sequence[x509.ExtensionType] = (),
    ) -> bytes:
        """Return a list of revoked certificates, in PEM; `valid` as in `issue`.

        The list, and its entries, have these critical extensions.
        """
        now = datetime.now(UTC)
        begin, end = (now + timedelta(days=each) for each in valid)
        builder = x509.CertificateRevocationListBuilder(self._name, begin, end)
        for pem in certificates:
            number = x509.load_pem_x509_certificate(pem).serial_number
            revoked = x509.RevokedCertificateBuilder(number, begin)
            for each in of_entries:
                revoked = revoked.add_extension(each, critical=True)
            builder = builder.add_revoked_certificate(revoked.build())
        for each in critical:
            builder = builder.add_extension(each, critical=True)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(
        self,
        *names: str,
        uris: Sequence[str] = (),
        common_name: str = "",
        valid: tuple[float, float] = (-1, 90),
    ) -> Pair:
        """Issue a certificate for host names and addresses, or for a client.

        `valid` are its begin and its end, in days from now. Without names and URIs it has no
        subject alternative names.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common_name), self._name, key, valid=valid)
        alternatives = [_general(each) for each in names]
        alternatives += [x509.UniformResourceIdentifier(each) for each in uris]
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=not common_name
            )
        return Pair(_signed(builder, self._key), _pem(key))


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    fields = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
    return x509.Name(fields)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid: tuple[float, float],
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begin, end = (now + timedelta(days=each) for each in valid)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _loaded(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def greet(
    address: str, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[ssl.SSLSession | None, bool]:
    """Connect, with a session from before; returns the new one, and whether it was resumed."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as secured,
    ):
        assert secured.recv(9)
        return secured.session, bool(secured.session_reused)
