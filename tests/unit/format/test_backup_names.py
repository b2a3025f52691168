"""Names in a repository of backups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.lease import leased_sst_id, new_lease_id
from shalekv.format import names
from shalekv.format.backup_names import (
    RESTORATION_NAME,
    LevelCopy,
    WalCopy,
    backup_name,
    begun_ms,
    is_backup_id,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.store.arguments import check_new_name

CHECKSUMS = st.integers(0, 2**32 - 1)
TIMES_MS = st.integers(0, 253_402_300_799_999)
WAL_COPIES = st.builds(
    WalCopy, st.integers(0, names.MAX_ID), st.binary(min_size=16, max_size=16), CHECKSUMS
)
LEVEL_COPIES = st.builds(
    LevelCopy,
    st.builds(
        lambda at, drawn: leased_sst_id(new_lease_id(at, drawn), drawn[2:]),
        st.integers(0, 2**47),
        st.binary(min_size=10, max_size=10),
    ),
    CHECKSUMS,
)


@given(WAL_COPIES | LEVEL_COPIES)
def test_the_name_of_a_copy_tells_all_of_it(copy: WalCopy | LevelCopy) -> None:
    """It is parsed back, and every store takes it; a database does not know the folder."""
    assert parse_copy(str(copy)) == copy
    check_new_name(str(copy))
    folder = str(copy).partition("/")[0] + "/"
    assert folder not in {names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER}


@given(TIMES_MS, TIMES_MS, st.binary(min_size=4, max_size=4))
def test_ids_order_by_time(one_ms: int, other_ms: int, random_bytes: bytes) -> None:
    """And tell it, to the millisecond."""
    one, other = new_backup_id(one_ms, random_bytes), new_backup_id(other_ms, random_bytes)
    assert (one < other) == (one_ms < other_ms)
    assert begun_ms(one) == one_ms
    assert is_backup_id(one)
    assert parse_backup_name(backup_name(one)) == one
    check_new_name(backup_name(one))


@pytest.mark.parametrize(
    "name",
    [
        "backup_wal/00000000000000000007.sst",
        "backup_wal/7.00000000000000000000000000000000.00000000.sst",
        "backup_wal/99999999999999999999.00000000000000000000000000000000.00000000.sst",
        "backup_levels/0198c0de-0000-4000-8000-000000000001.00000000.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.0000000.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.0000000A.sst",
        "backup_levels/0198c0de-0000-7000-8000-000000000001.00000000.sst.tmp",
        "wal/00000000000000000007.sst",
        "backups/20260230T040000123Z-1f2e3d4c.backup",
        "backups/20260131T040000123Z-1f2e3d4.backup",
        RESTORATION_NAME,
    ],
)
def test_other_names_are_nothing(name: str) -> None:
    """Somebody else may have put them there."""
    assert (parse_copy(name), parse_backup_name(name), parse_mark(name)) == (None, None, None)
