"""Identities of client certificates, which TLS has verified.

All URIs and DNS names of the subject alternative name are subjects. The first URI names the
principal, else the first DNS name; a certificate without that extension is named by the one common
name of its subject. DNS names are in small letters, since case has no meaning in them.
"""

from __future__ import annotations

from datetime import datetime

from cryptography import x509
from cryptography.x509.oid import NameOID

from shalekv.errors import Unauthenticated
from shalekv.protocol.access import Principal
from shalekv.server.access.identity import Identity
from shalekv.wording import MS_PER_S

CERTIFICATE_BYTES_MAX = 64 << 10
NAME_BYTES_MAX = 1 << 10
NAMES_MAX = 128

_DAMAGED = (
    ValueError,
    TypeError,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def decode_certificate(certificate: bytes) -> Identity:
    """Return the identity that a certificate in DER names. Raises `Unauthenticated`."""
    if len(certificate) > CERTIFICATE_BYTES_MAX:
        raise Unauthenticated(f"the certificate is larger than {CERTIFICATE_BYTES_MAX} bytes")
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        names = _names_of(parsed)
        expires = parsed.not_valid_after_utc
    except _DAMAGED:
        raise Unauthenticated("the certificate is damaged") from None
    if not names:
        raise Unauthenticated("the certificate has no URI or DNS name, nor one common name")
    if len(names) > NAMES_MAX:
        raise Unauthenticated(f"the certificate has more than {NAMES_MAX} names")
    for name in names:
        if not is_name(name):
            raise Unauthenticated(
                f"a name of the certificate has more than {NAME_BYTES_MAX} bytes, or characters "
                "that cannot be printed"
            )
    return Identity(Principal(names[0], frozenset(names[1:])), _ms_of(expires))


def is_name(text: str) -> bool:
    """Return whether a text from outside may be a part of a subject."""
    return text.isprintable() and len(text.encode(errors="replace")) <= NAME_BYTES_MAX


def _names_of(certificate: x509.Certificate) -> list[str]:
    """Return the subjects, with the one that names the principal first."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        texts = [each.value for each in common if isinstance(each.value, str) and each.value]
        return [f"cn:{texts[0]}"] if len(texts) == 1 else []
    uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = extension.value.get_values_for_type(x509.DNSName)
    return [f"uri:{each}" for each in uris if each] + [
        f"dns:{each.lower()}" for each in hosts if each
    ]


def _ms_of(at: datetime) -> float:
    return at.timestamp() * MS_PER_S
