"""The URL of a database is parsed as intended, or refused with advice on how to write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shalekv.errors import InvalidUrl
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Exists
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryStore
from shalekv.store.opening import open_store
from shalekv.store.url import BucketUrl, DatabaseUrl, FileUrl, MemoryUrl, Provider, parse_url
from tests.kit.inline_runtime import inline_runtime

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///data", FileUrl(Path("/data"))),
        ("file:///var/lib/shalekv/", FileUrl(Path("/var/lib/shalekv"))),
        ("file:////data//x", FileUrl(Path("/data/x"))),
        ("FILE:///Data", FileUrl(Path("/Data"))),
        ("file:///with%20space/100%25/%3Fq", FileUrl(Path("/with space/100%/?q"))),
        ("file:///with space", FileUrl(Path("/with space"))),
        ("file:///a@b:c", FileUrl(Path("/a@b:c"))),
        ("file:///caf%C3%A9", FileUrl(Path("/café"))),
        ("memory://trial", MemoryUrl("trial")),
        ("s3://bucket", BucketUrl(Provider.S3, "bucket", "")),
        ("s3://bucket/", BucketUrl(Provider.S3, "bucket", "")),
        ("s3://my.bucket-1//a/b%20c/", BucketUrl(Provider.S3, "my.bucket-1", "a/b c")),
        ("gs://bucket_2/db", BucketUrl(Provider.GOOGLE, "bucket_2", "db")),
        ("az://container/db", BucketUrl(Provider.AZURE, "container", "db")),
        ("memory://Trial-2.b_c", MemoryUrl("Trial-2.b_c")),
    ],
)
def test_good_urls(text: str, expected: DatabaseUrl) -> None:
    """A valid URL of a database is parsed."""
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "empty"),
        (" file:///data", "spaces"),
        ("file:///data\n", "control characters"),
        ("/data", "has no scheme"),
        ("data", "absolute path"),
        ("./data", "absolute path"),
        ("file:/data", "has no scheme"),
        ("file:", "has no scheme"),
        ("file://", "absolute path"),
        ("file:///", "not the root"),
        ("file:////", "not the root"),
        ("file://data", "file:///data"),
        ("file://data/x", "file:///data/x"),
        ("file://./data", "third slash"),
        ("file://localhost/data", "third slash"),
        ("file:///data/../etc", "'..'"),
        ("file:///data/%2e%2e/etc", "'..'"),
        ("file:///./data", "'.'"),
        ("file:///data?sync=no", "no query"),
        ("file:///data?", "no query"),
        ("file:///data#1", "%23"),
        ("file:///data%00", "%00"),
        ("file:///100%", "%25"),
        ("file:///%ff", "UTF-8"),
        ("memory://", "is not a name"),
        ("memory:///x", "is not a name"),
        ("memory://a/b", "is not a name"),
        ("memory://a/", "is not a name"),
        ("memory://a:1", "is not a name"),
        ("memory://.a", "is not a name"),
        ("memory://" + 64 * "a", "63"),
        ("s3://", "names no bucket"),
        ("s3:///folder", "names no bucket"),
        ("gs://b/folder", "is not the name of a bucket"),
        ("s3://127.0.0.1:9000/bucket", "--endpoint-url"),
        ("az://bucket/caf%C3%A9", "ASCII"),
        ("s3://bucket/" + 401 * "a", "400"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/100%", "%25"),
        ("http://example.com/db", "http:// is not a kind of store"),
        ("://data", "not a kind of store"),
        ("file://[::1", "cannot be read"),
    ],
)
def test_bad_urls(text: str, advice: str) -> None:
    """Any other URL is refused, with a message that says how to write it."""
    with pytest.raises(InvalidUrl) as raised:
        parse_url(text)
    assert advice in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://key:{SECRET}@bucket/db",
        f"file://user:{SECRET}@host/data",
        f"memory://user:{SECRET}@a",
        f"s3://bucket/db?secret={SECRET}",
        f"file:///data#{SECRET}",
        f"data?{SECRET}",
        f"s3://[{SECRET}@bucket",
    ],
)
def test_secrets_are_refused_and_not_repeated(text: str) -> None:
    """Credentials in a URL are refused, and do not show up in the message."""
    with pytest.raises(InvalidUrl) as raised:
        parse_url(text)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("text", ["s3://bucket", "gs://bucket/a/b%20c", "az://container/x"])
def test_a_bucket_url_leads_to_itself(text: str) -> None:
    """The text of a bucket URL is parsed to the same URL."""
    assert str(parse_url(text)) == text


async def test_a_file_url_opens_a_folder(tmp_path: Path) -> None:
    """A folder of any name can be opened, and the store's URL leads to it again."""
    folder = tmp_path / "100% of a?b#c é"
    store = LocalStore(folder, inline_runtime())
    await store.create("wal/1", b"x")
    again = open_store(store.url, inline_runtime(1), StoreSettings())
    assert isinstance(again, LocalStore)
    assert again.url == store.url
    assert (await again.get("wal/1")).data == b"x"
    assert (folder / "wal" / "1").read_bytes() == b"x"


def test_opening_touches_nothing(tmp_path: Path) -> None:
    """Opening a store creates no folder: a mistyped URL leaves no trace."""
    open_store(f"file://{tmp_path}/none", inline_runtime(), StoreSettings())
    assert list(tmp_path.iterdir()) == []


async def test_a_memory_name_is_one_database() -> None:
    """A name opened twice in a process is one database, another name another one."""
    runtime = inline_runtime()
    first = open_store("memory://test-url-one", runtime, StoreSettings())
    again = open_store("memory://test-url-one", runtime, StoreSettings())
    other = open_store("memory://test-url-two", runtime, StoreSettings())
    assert isinstance(first, MemoryStore)
    assert await first.create("wal/1", b"x") == Created()
    await first.close()
    assert await again.create("wal/1", b"y") == Exists()
    assert await other.create("wal/1", b"z") == Created()
    assert again.url == "memory://test-url-one"
    before_ms = await again.now_ms()
    assert (await again.head("wal/1")).modified_ms <= before_ms <= await other.now_ms()
