"""Records in a file of SQLite keep the contract of record stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.opening_records import opener
from tests.contract.record_contract import OpenRecords, RecordContract


class TestSqliteRecords(RecordContract):
    @pytest.fixture
    def open_records(self, tmp_path: Path) -> OpenRecords:
        """Connections of their own to one file."""
        return opener(f"sqlite://{tmp_path}/records.db")
