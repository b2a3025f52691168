"""Where the election is held, as `elect` names it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shalekv.errors import InvalidSetting

BUCKET = "bucket"
ETCD_SCHEME = "etcd://"
EXAMPLES = f"{BUCKET} or {ETCD_SCHEME}HOST:PORT,HOST:PORT/name/of/the/key"
PORT_MAX = 65_535

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_KEY = re.compile(r"[A-Za-z0-9._/-]{1,400}")


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


def parse_place(elect: str) -> BucketPlace | EtcdPlace:
    """Where `elect` says; raises `InvalidSetting`."""
    if elect == BUCKET:
        return BucketPlace()
    addresses, slash, key = elect.removeprefix(ETCD_SCHEME).partition("/")
    if not elect.startswith(ETCD_SCHEME) or not slash or _KEY.fullmatch(key) is None:
        raise InvalidSetting(f"--elect must be {EXAMPLES}, not {elect!r}")
    return EtcdPlace(tuple(_address(each) for each in addresses.split(",")), key)


def _address(text: str) -> EtcdAddress:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= PORT_MAX:
        raise InvalidSetting(f"--elect: {text!r} is not HOST:PORT of a server of etcd")
    return EtcdAddress(found[1].strip("[]"), int(found[2]))
