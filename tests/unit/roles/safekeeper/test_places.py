"""Which databases a node takes."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidUrl
from shalekv.roles.safekeeper.places import check_place


@pytest.mark.parametrize(
    ("url", "node_url"),
    [
        ("file:///srv/databases", "file:///srv/databases"),
        ("file:///srv/databases/one", "file:///srv/databases"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/one", "s3://bucket"),
        ("s3://bucket/folder/one", "s3://bucket/folder/"),
        ("memory://one", "memory://one"),
    ],
)
def test_at_or_below(url: str, node_url: str) -> None:
    """What lies at or below the URL of the node is taken."""
    assert check_place(url, node_url) == url


@pytest.mark.parametrize(
    ("url", "node_url"),
    [
        ("file:///srv", "file:///srv/databases"),
        ("file:///srv/databases2", "file:///srv/databases"),
        ("file:///srv/databases/../other", "file:///srv/databases"),
        ("s3://bucket/folder2", "s3://bucket/folder"),
        ("s3://other/folder", "s3://bucket/folder"),
        ("gs://bucket/folder", "s3://bucket/folder"),
        ("file:///bucket", "s3://bucket"),
        ("memory://two", "memory://one"),
        ("", "file:///srv"),
    ],
)
def test_elsewhere(url: str, node_url: str) -> None:
    """What lies elsewhere is refused."""
    with pytest.raises(InvalidUrl):
        check_place(url, node_url)
