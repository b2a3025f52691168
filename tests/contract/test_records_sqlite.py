"""Records in a file of SQLite keep the contract of record stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords, RecordContract


class TestSqliteRecords(RecordContract):
    @pytest.fixture
    def open_records(self, sqlite_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return sqlite_records
