"""S3 with two-phase compare-and-swap, decided by DynamoDB, keeps the contract of object stores."""

from __future__ import annotations

import pytest

from tests.contract.record_contract import OpenRecords
from tests.contract.two_phase_contract import TwoPhaseContract


class TestTwoPhaseOnDynamo(TwoPhaseContract):
    @pytest.fixture
    def open_records(self, dynamo_records: OpenRecords) -> OpenRecords:
        """Connections of their own to one new table."""
        return dynamo_records
