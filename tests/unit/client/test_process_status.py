"""What a status tells of reader, watches and calls, and what follows from histograms."""

from __future__ import annotations

import pytest

from shalekv.v1 import admin_pb2
from shalekv_client import CallStatus, ReaderState
from shalekv_client.process_status import percentile
from shalekv_client.server_status import status_of


def test_status_has_reader_watches_and_calls() -> None:
    """Each as the server told it; None and nothing where it told nothing."""
    reply = admin_pb2.StatusReply(
        reader=admin_pb2.ReaderStatus(
            state=admin_pb2.ReaderStatus.State.STATE_CUT_OFF,
            next_wal_id=5,
            writer_address="a:1",
            tail_address="b:2",
            tails=3,
        ),
        watches=admin_pb2.WatchStatus(watches=3, cut=1),
        calls=[admin_pb2.CallStatus(method="KV.Get", calls=2, histogram_us=[0, 2])],
        reads=admin_pb2.ReadStatus(disk=admin_pb2.CacheStatus(hits=4)),
    )
    status = status_of(reply)
    assert status.reader is not None
    assert (status.reader.state, status.reader.next_wal_id) == (ReaderState.CUT_OFF, 5)
    assert (status.reader.tail_address, status.reader.tails) == ("b:2", 3)
    assert status.watches is not None
    assert (status.watches.watches, status.watches.cut) == (3, 1)
    assert status.calls == (CallStatus("KV.Get", 2, 0, 0, (0, 2)),)
    assert status.reads is not None
    assert status.reads.disk is not None
    assert status.reads.disk.hits == 4
    nothing = status_of(admin_pb2.StatusReply())
    assert (nothing.reader, nothing.watches, nothing.calls) == (None, None, ())


@pytest.mark.parametrize(
    ("histogram", "part", "least", "most"),
    [
        ([], 0.5, None, None),
        ([0, 0], 0.5, None, None),
        ([4], 0.5, 0, 2),
        ([0, 0, 0, 1], 0.5, 8, 16),
        ([99, 0, 0, 0, 1], 0.5, 0, 2),
        ([99, 0, 0, 0, 1], 0.99, 0, 2),
        ([98, 0, 0, 0, 2], 0.99, 16, 32),
        ([1, 1], 1.0, 4, 4),
    ],
)
def test_percentiles_lie_in_the_bucket_that_holds_them(
    histogram: list[int], part: float, least: float | None, most: float | None
) -> None:
    """Between its ends; of nothing there is none."""
    found = percentile(histogram, part)
    if least is None or most is None:
        assert found is None
    else:
        assert found is not None
        assert least <= found <= most


def test_calls_since_an_earlier_status() -> None:
    """The differences; all of them where the counter went back, or there was none before."""
    before = CallStatus("KV.Get", 2, 1, 10, (0, 2))
    after = CallStatus("KV.Get", 5, 1, 40, (1, 3, 1))
    assert after.since(before) == CallStatus("KV.Get", 3, 0, 30, (1, 1, 1))
    assert after.since(None) == after
    assert before.since(after) == before
