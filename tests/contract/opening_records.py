"""Opens record stores as the server does: by the URL in the settings."""

from __future__ import annotations

from random import SystemRandom

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.two_phase.opening import open_records
from tests.contract.record_contract import OpenRecords
from tests.kit.inline_runtime import InlineWorkers


def opener(records_url: str, *, endpoint_url: str = "") -> OpenRecords:
    """A function whose every call opens the records at this URL, with connections of its own."""
    runtime = Runtime(LoopClock(), SystemRandom(), InlineWorkers())
    settings = StoreSettings(
        cas=CasChoice.TWO_PHASE, records_url=records_url, records_endpoint_url=endpoint_url
    )
    return lambda: open_records(runtime, settings)
