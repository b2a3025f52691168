"""Records in PostgreSQL keep the contract of record stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords, RecordContract


class TestPostgresRecords(RecordContract):
    @pytest.fixture
    def open_records(self, postgres_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return postgres_records
