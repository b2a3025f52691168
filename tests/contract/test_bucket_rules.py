"""The rules of a bucket, as a server with S3's protocol tells them, and one that has none."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from shalekv.cli.doctor.store import judge_rules
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.bucket_rules import BucketRules, LifecycleRule, NotTold
from shalekv.store.s3.rules import read_rules
from shalekv.store.url import BucketUrl, Provider
from tests.kit.processes.in_process import real_runtime
from tests.servers.s3 import S3Server

S3 = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
RULES = f"""<LifecycleConfiguration {S3}>
<Rule><ID>off</ID><Status>Disabled</Status><Filter><Prefix/></Filter>
  <Expiration><Days>1</Days></Expiration></Rule>
<Rule><ID>old</ID><Status>Enabled</Status><Filter><Prefix>db/</Prefix></Filter>
  <Expiration><Days>30</Days></Expiration>
  <Transition><Days>10</Days><StorageClass>GLACIER</StorageClass></Transition></Rule>
<Rule><ID>tidy</ID><Status>Enabled</Status><Filter><Prefix/></Filter>
  <NoncurrentVersionExpiration><NoncurrentDays>7</NoncurrentDays></NoncurrentVersionExpiration>
  <AbortIncompleteMultipartUpload><DaysAfterInitiation>2</DaysAfterInitiation>
  </AbortIncompleteMultipartUpload></Rule>
</LifecycleConfiguration>"""
VERSIONING = f"<VersioningConfiguration {S3}><Status>Enabled</Status></VersioningConfiguration>"


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Real time, and a thread."""
    with real_runtime(threads=1) as runtime:
        yield runtime


async def rules_of(
    server: S3Server, bucket: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> BucketRules:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    settings = StoreSettings(endpoint_url=server.endpoint)
    return await read_rules(BucketUrl(Provider.S3, bucket, "db"), runtime, settings)


async def test_rules_are_read(
    moto_server: S3Server, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new bucket has no rules; versioning, its cost, and the rules that are enabled are read."""
    bucket = f"bucket-{uuid4()}"
    moto_server.create_bucket(bucket)
    found = await rules_of(moto_server, bucket, runtime, monkeypatch)
    assert found == BucketRules("", None, (), "")

    moto_server.request("PUT", f"/{bucket}?versioning", VERSIONING.encode())
    moto_server.request("PUT", f"/{bucket}?lifecycle", RULES.encode())
    for name in ("db/a", "other/a"):
        moto_server.request("PUT", f"/{bucket}/{name}", b"four")
        moto_server.request("DELETE", f"/{bucket}/{name}")
    found = await rules_of(moto_server, bucket, runtime, monkeypatch)
    assert found.versioning == "Enabled"
    assert not isinstance(found.noncurrent, NotTold)
    assert found.noncurrent is not None
    assert (found.noncurrent.versions, found.noncurrent.size_bytes) == (1, 4)
    assert found.lifecycle == [
        LifecycleRule("old", "db/", False, "after 30 days", storage_classes=("GLACIER",)),
        LifecycleRule("tidy", "", False, noncurrent_days=7, abort_days=2),
    ]
    judged = judge_rules(found, bucket=bucket, folder="db")
    assert [(each.check, each.severity.value) for each in judged] == [
        ("lifecycle", "problem"),
        ("lifecycle", "problem"),
        ("versioning", "warning"),
        ("object lock", "ok"),
    ]


async def test_what_a_server_does_not_have_or_refuses_is_not_told(
    s3_server: S3Server, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without lifecycle rules says so; a bucket that is missing ends no question."""
    found = await rules_of(s3_server, "tests", runtime, monkeypatch)
    assert found.lifecycle == NotTold("this kind of store does not have it")
    assert (found.versioning, found.lock) == ("", "")
    missing = await rules_of(s3_server, "no-such-bucket", runtime, monkeypatch)
    assert isinstance(missing.versioning, NotTold)
    assert "there is no bucket no-such-bucket" in missing.versioning.reason
    assert isinstance(missing.lock, NotTold)
