"""Where the election is held, as `elect` names it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shalekv.errors import InvalidSetting

BUCKET = "bucket"
ETCD_SCHEME = "etcd://"
KUBERNETES_SCHEME = "kubernetes://"
EXAMPLES = (
    f"{BUCKET}, {ETCD_SCHEME}HOST:PORT,HOST:PORT/name/of/the/key "
    f"or {KUBERNETES_SCHEME}NAMESPACE/NAME"
)
PORT_MAX = 65_535
NAMESPACE_CHARS_MAX = 63
LEASE_NAME_CHARS_MAX = 253

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_KEY = re.compile(r"[A-Za-z0-9._/-]{1,400}")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_LEASE_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """The bucket of the database."""


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """One server of etcd."""

    host: str
    port: int

    def __str__(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """A key of etcd, and the servers that have it."""

    addresses: tuple[EtcdAddress, ...]
    key: str


@dataclass(frozen=True, slots=True)
class KubernetesPlace:
    """A Lease of Kubernetes."""

    namespace: str  # empty: that of the service account
    name: str


def parse_place(elect: str) -> BucketPlace | EtcdPlace | KubernetesPlace:
    """The place that `elect` names; raises `InvalidSetting`."""
    if elect == BUCKET:
        return BucketPlace()
    before, slash, after = elect.partition("://")[2].partition("/")
    if elect.startswith(ETCD_SCHEME) and slash and _KEY.fullmatch(after) is not None:
        return EtcdPlace(tuple(_address(each) for each in before.split(",")), after)
    if elect.startswith(KUBERNETES_SCHEME) and slash:
        return KubernetesPlace(check_namespace(before) if before else "", _lease_name(after))
    raise InvalidSetting(f"--elect must be {EXAMPLES}, not {elect!r}")


def check_namespace(text: str) -> str:
    """The name of a namespace of Kubernetes; raises `InvalidSetting` for any other text."""
    if len(text) > NAMESPACE_CHARS_MAX or _NAMESPACE.fullmatch(text) is None:
        raise InvalidSetting(
            f"--elect: {text!r} is not the name of a namespace of Kubernetes: at most "
            f"{NAMESPACE_CHARS_MAX} characters of a-z, 0-9 and '-', a letter or digit at both ends"
        )
    return text


def _lease_name(text: str) -> str:
    if len(text) > LEASE_NAME_CHARS_MAX or _LEASE_NAME.fullmatch(text) is None:
        raise InvalidSetting(
            f"--elect: {text!r} is not the name of a Lease of Kubernetes: at most "
            f"{LEASE_NAME_CHARS_MAX} characters of a-z, 0-9, '-' and '.', "
            "a letter or digit at both ends and around each '.'"
        )
    return text


def _address(text: str) -> EtcdAddress:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= PORT_MAX:
        raise InvalidSetting(f"--elect: {text!r} is not HOST:PORT of a server of etcd")
    return EtcdAddress(found[1].strip("[]"), int(found[2]))
