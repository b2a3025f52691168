"""Records are opened by a URL, which may hold a password that nobody else may see."""

from __future__ import annotations

import traceback

import pytest

from shalekv.core.two_phase import Destination, Record
from shalekv.errors import InvalidSetting, StoreError
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.two_phase.opening import open_records
from shalekv.store.two_phase.records import RecordStore
from tests.unit.store.inline_runtime import inline_runtime

SECRET = "SENTINEL-p4ss"
RECORD = Record(Destination("s3://bucket", "wal/1"), "wal/1.source")


def opened(records_url: str) -> RecordStore:
    """The records at this URL."""
    settings = StoreSettings(
        cas=CasChoice.TWO_PHASE, records_url=records_url, connect_timeout_ms=500
    )
    return open_records(inline_runtime(), settings)


@pytest.mark.parametrize(
    ("records_url", "shown"),
    [
        ("dynamodb://records", "dynamodb://records"),
        ("sqlite:///var/lib/records.db", "sqlite:///var/lib/records.db"),
        ("sqlite:////var/lib/records.db", "sqlite:///var/lib/records.db"),
        (f"mysql://me:{SECRET}@host/db", "mysql://host/db"),
        (f"mariadb://me:{SECRET}@host:3307/db", "mysql://host:3307/db"),
        (f"postgresql://me:{SECRET}%40%2F@host/db?tls=on", "postgresql://host/db"),
        (f"postgres://me:{SECRET}@[::1]:5433/db", "postgresql://::1:5433/db"),
    ],
)
async def test_urls(records_url: str, shown: str) -> None:
    """The URL of the records says where they are, and not who may use them."""
    records = opened(records_url)
    assert records.url == shown
    assert SECRET not in repr(records)
    assert SECRET not in repr(vars(records).get("_engine"))
    await records.close()


@pytest.mark.parametrize(
    ("records_url", "problem"),
    [
        ("", "set records_url to dynamodb://TABLE"),
        ("records.db", "names no transactional store"),
        (f"oracle://me:{SECRET}@host/db", "names no transactional store"),
        (f"mysql://me:{SECRET}@/db", "no host"),
        (f"mysql://me:{SECRET}@host", "no database"),
        (f"mysql://me:{SECRET}@host/db/more", "no database"),
        (f"mysql://me:{SECRET}@host/db?ssl=yes", "no options but"),
        (f"mysql://me:{SECRET}@host:port/db", "cannot be read"),
        (f"mysql://me:{SECRET}/more@host/db", "cannot be read"),
        (f"mysql://me:{SECRET}@[host/db", "cannot be read"),
        ("sqlite://records.db", "names no file"),
        ("sqlite://", "names no file"),
        ("sqlite:///var/lib/../records.db", "names no file"),
        ("sqlite:///var/lib/", "names no file"),
        ("sqlite:///records.db?mode=memory", "names no file"),
        ("dynamodb://", "names no table"),
        ("dynamodb://a/b", "names no table"),
        ("dynamodb://a b c", "names no table"),
    ],
)
def test_bad_urls(records_url: str, problem: str) -> None:
    """What cannot be meant is refused with what to write, and never quoted."""
    with pytest.raises(InvalidSetting, match=problem) as raised:
        opened(records_url)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown


@pytest.mark.parametrize("scheme", ["mysql", "postgresql"])
async def test_a_server_that_is_down(scheme: str) -> None:
    """Without a connection nothing was inserted, and the error holds no password."""
    records = opened(f"{scheme}://me:{SECRET}@127.0.0.1:1/db")
    with pytest.raises(StoreError, match=f"{scheme}://127.0.0.1:1/db: prepare") as raised:
        await records.insert(RECORD)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown
    await records.close()


async def test_a_file_that_cannot_be_made() -> None:
    """A folder that is not there is a refusal that names the file."""
    records = opened("sqlite:///nowhere/at/all/records.db")
    with pytest.raises(StoreError, match="sqlite:///nowhere/at/all/records.db.*unable to open"):
        await records.insert(RECORD)
    await records.close()
