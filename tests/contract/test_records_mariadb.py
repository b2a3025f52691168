"""Records in MariaDB keep the contract of record stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords, RecordContract


class TestMariaRecords(RecordContract):
    @pytest.fixture
    def open_records(self, maria_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return maria_records
