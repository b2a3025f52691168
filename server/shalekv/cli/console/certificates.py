"""Small certificate authorities for trials, and the certificates of servers and clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shalekv.cli.console.atomic_file import atomic_file
from shalekv.rpc.revocation import is_of, lists_of

AUTHORITY_DAYS = 3_650
CERTIFICATE_MODE, KEY_MODE = 0o644, 0o600

_BACKDATED = timedelta(hours=1)  # the clocks of other machines may be behind
_USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_KEY_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The PEM files of a certificate and of its private key: `STEM.crt` and `STEM.key`."""

    certificate_path: Path
    key_path: Path

    @classmethod
    def at(cls, folder: Path, stem: str) -> Pair:
        """Name the files of a folder."""
        return cls(folder / f"{stem}.crt", folder / f"{stem}.key")

    @property
    def exists(self) -> bool:
        """Return whether both files are there. Raises `FileNotFoundError` if only one is."""
        found = self.certificate_path.exists(), self.key_path.exists()
        if found[0] != found[1]:
            there, missing = self.certificate_path, self.key_path
            if found[1]:
                there, missing = missing, there
            raise FileNotFoundError(f"{there} is there, and {missing.name} is not")
        return found[0]

    def certificate(self) -> x509.Certificate:
        """Read the certificate. Raises `OSError`, and `ValueError` if it is damaged."""
        return x509.load_pem_x509_certificate(self.certificate_path.read_bytes())

    def key(self) -> ec.EllipticCurvePrivateKey:
        """Read the private key. Raises as `certificate`, and `ValueError` for another kind."""
        key = serialization.load_pem_private_key(self.key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{self.key_path} is not a key of an elliptic curve")  # noqa: TRY004 - the file is wrong, not a type
        return key

    def write_key(self) -> ec.EllipticCurvePrivateKey:
        """Make a private key, and write it to a file that its owner alone can read."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        with atomic_file(self.key_path, KEY_MODE) as file:
            file.write(pem)
        return key

    def write_certificate(self, certificate: x509.Certificate) -> None:
        """Write the certificate."""
        self.write_certificates(certificate.public_bytes(serialization.Encoding.PEM))

    def write_certificates(self, pem: bytes) -> None:
        """Write the file of the certificate, which may have lists of revoked ones as well."""
        with atomic_file(self.certificate_path, CERTIFICATE_MODE) as file:
            file.write(pem)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority, whose files are a `Pair`."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, pair: Pair) -> Authority:
        """Read an authority. Raises `OSError` and `ValueError`."""
        return cls(pair.certificate(), pair.key())

    @classmethod
    def create(cls, pair: Pair, name: str) -> Authority:
        """Make an authority, and write its files."""
        key = pair.write_key()
        subject = _subject(name)
        builder = _builder(subject, subject, key.public_key(), timedelta(days=AUTHORITY_DAYS))
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .sign(key, hashes.SHA256())
        )
        pair.write_certificate(certificate)
        return cls(certificate, key)

    def issue(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        alternatives: Iterable[x509.GeneralName],
        *,
        days: int,
        is_server: bool,
    ) -> x509.Certificate:
        """Issue a certificate for `days`, but not for longer than the authority is valid itself.

        That of a server is also one of a client: servers connect to safekeepers.
        """
        issuer = self.certificate
        builder = _builder(
            _subject(name), issuer.subject, key, timedelta(days=days), issuer.not_valid_after_utc
        )
        of_issuer = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        uses = _USES if is_server else _USES[1:]
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_issuer),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Return whether a certificate is one of this authority, and not its own."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return certificate != self.certificate

    def revoke(
        self, certificates: Iterable[x509.Certificate], pem: bytes, *, days: int
    ) -> x509.CertificateRevocationList:
        """Return a list for `days` of these certificates, and of those in the lists of a file.

        Raises `ValueError` if one of these lists is damaged.
        """
        now = datetime.now(UTC)
        lists = [each for each in lists_of(pem) if is_of(each, self.certificate)]
        revoked = {each.serial_number: each for listed in lists for each in listed}
        for certificate in certificates:
            number = certificate.serial_number
            builder = x509.RevokedCertificateBuilder(number, now)
            revoked.setdefault(number, builder.build())
        of_issuer = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        key_name = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_issuer.value)
        return (
            x509.CertificateRevocationListBuilder(
                self.certificate.subject,
                now - _BACKDATED,
                now + timedelta(days=days),
                revoked_certificates=[*revoked.values()],
            )
            .add_extension(key_name, critical=False)
            .add_extension(x509.CRLNumber(int(now.timestamp() * 1_000)), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def name_of_host(host: str) -> x509.GeneralName:
    """Return the alternative name for an IP address or a name in DNS."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def alternatives_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the alternative names of a certificate that `Authority.issue` has made."""
    return [*certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    validity: timedelta,
    end: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + validity if end is None else min(now + validity, end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{each: each in uses for each in _KEY_USES})


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "ShaleKV"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
