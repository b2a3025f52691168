"""Where `elect` says that the election is held."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidSetting
from shalekv.roles.electors.place import BucketPlace, EtcdAddress, EtcdPlace, parse_place


def test_places() -> None:
    """The bucket, and a key of etcd with one server or several."""
    assert parse_place("bucket") == BucketPlace()
    assert parse_place("etcd://a:2379/db") == EtcdPlace((EtcdAddress("a", 2379),), "db")
    several = parse_place("etcd://a.b:1,[::1]:2/shale/db-1")
    assert several == EtcdPlace((EtcdAddress("a.b", 1), EtcdAddress("::1", 2)), "shale/db-1")
    assert isinstance(several, EtcdPlace)
    assert [str(each) for each in several.addresses] == ["a.b:1", "[::1]:2"]


@pytest.mark.parametrize(
    "elect",
    [
        "buckets",
        "Bucket",
        "etcd://",
        "etcd://a:1",
        "etcd://a:1/",
        "etcd://a/db",
        "etcd://a:0/db",
        "etcd://a:99999/db",
        "etcd://a:1,/db",
        "etcd://a:1/d b",
        "http://a:1/db",
    ],
)
def test_other_texts_are_refused(elect: str) -> None:
    """By the name of the setting."""
    with pytest.raises(InvalidSetting, match=r"^--elect"):
        parse_place(elect)
