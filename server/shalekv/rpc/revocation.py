"""Lists of revoked certificates (CRLs) in a PEM file of authorities.

A list is used as a whole or not at all: with one that is damaged, or missing, or signed by somebody
else, or for some certificates or reasons alone, OpenSSL would refuse all clients of its authority.
So such a file is refused before.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.x509.oid import NameOID

from shalekv_wire.tls import Lists, RevocationList

_LIST = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----\n?", re.DOTALL)
_DAMAGED = (
    TypeError,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
_NEVER = datetime.max.replace(tzinfo=UTC)


def read_lists(pem: bytes) -> Lists:
    """Return the lists of a file of authorities.

    Raises:
        ValueError: something in it is damaged; or there are not as many lists of an authority as
            one, unless it has expired; or a list is of none of them, or of changes only, or of some
            certificates or reasons only; or it has something else that OpenSSL does not know.
    """
    try:
        return _checked(pem)
    except _DAMAGED:
        raise ValueError("a damaged certificate or list of revoked certificates") from None


def _checked(pem: bytes) -> Lists:
    authorities, lists = x509.load_pem_x509_certificates(pem), lists_of(pem)
    now = datetime.now(UTC)
    for authority in authorities:
        count = sum(is_of(each, authority) for each in lists)
        name = name_of(authority.subject)
        if count > 1:
            raise ValueError(f"{count} lists of revoked certificates of {name!r}: keep the newest")
        if not count and authority.not_valid_after_utc > now:
            raise ValueError(
                f"no list of revoked certificates of {name!r}, and there are some of others: "
                "each authority needs one"
            )
    for each in lists:
        if not any(is_of(each, authority) for authority in authorities):
            raise ValueError(
                f"the list of revoked certificates of {name_of(each.issuer)!r} is of no authority "
                "of the file that may sign it"
            )
        _check_scope(each)
    return tuple(map(_described, lists))


def _check_scope(found: x509.CertificateRevocationList) -> None:
    """Raise `ValueError` for a list that OpenSSL would not use for each certificate."""
    whose = f"the list of revoked certificates of {name_of(found.issuer)!r}"
    for each in found.extensions:
        match each.value:
            case x509.DeltaCRLIndicator():
                raise ValueError(f"{whose} has changes alone: use the whole one")
            case x509.IssuingDistributionPoint():
                raise ValueError(
                    f"{whose} is for a part of its certificates (issuingDistributionPoint): use a "
                    "whole one"
                )
            case x509.AuthorityKeyIdentifier():
                continue
        if each.critical:
            raise ValueError(f"{whose} has a critical extension {each.oid.dotted_string}")
    for each in chain.from_iterable(entry.extensions for entry in found):
        if each.critical:
            what = f"an entry with a critical extension {each.oid.dotted_string}"
            raise ValueError(f"{whose} has {what}")


def lists_of(pem: bytes) -> list[x509.CertificateRevocationList]:
    """Return the lists of a file. Raises `ValueError`."""
    try:
        return [x509.load_pem_x509_crl(each) for each in _LIST.findall(pem)]
    except ValueError:
        raise ValueError("a damaged list of revoked certificates") from None


def without_lists(pem: bytes, authority: x509.Certificate) -> bytes:
    """Return what is in a file beside the lists of an authority. Raises `ValueError`."""

    def kept(block: re.Match[bytes]) -> bytes:
        return b"" if is_of(lists_of(block[0])[0], authority) else block[0]

    return _LIST.sub(kept, pem)


def is_of(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    """Return whether an authority has made a list, and may."""
    with suppress(x509.ExtensionNotFound):
        uses = authority.extensions.get_extension_for_class(x509.KeyUsage).value
        if not uses.crl_sign:
            return False
    key = cast("CertificateIssuerPublicKeyTypes", authority.public_key())
    with suppress(TypeError, UnsupportedAlgorithm):  # a kind of key that signs nothing
        return found.issuer == authority.subject and found.is_signature_valid(key)
    return False


def name_of(subject: x509.Name) -> str:
    """Return the name of an authority, for people."""
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else subject.rfc4514_string()


def _described(found: x509.CertificateRevocationList) -> RevocationList:
    ends = found.next_update_utc or _NEVER
    return RevocationList(name_of(found.issuer), found.last_update_utc, ends)
