"""Records in memory keep the contract of record stores."""

from __future__ import annotations

import pytest

from shalekv.store.two_phase.memory import MemoryRecords, Table
from tests.contract.record_contract import OpenRecords, RecordContract


class TestMemoryRecords(RecordContract):
    @pytest.fixture
    def open_records(self) -> OpenRecords:
        """Views of the same table."""
        table: Table = {}
        return lambda: MemoryRecords(table=table)
