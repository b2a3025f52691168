"""Records in DynamoDB Local, and in the simulation of moto, keep the contract of record stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords, RecordContract


class TestDynamoRecords(RecordContract):
    @pytest.fixture
    def open_records(self, dynamo_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return dynamo_records


class TestMotoRecords(RecordContract):
    @pytest.fixture
    def open_records(self, moto_records: OpenRecords) -> OpenRecords:
        """As above."""
        return moto_records
