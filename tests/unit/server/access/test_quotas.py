"""Quotas: rates, limits of what is in flight or open, and what a change of the policy leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest

from shalekv.errors import QuotaExceeded
from shalekv.protocol.access import Quota
from shalekv.server.access.quotas import (
    IN_FLIGHT_RETRY_MS,
    OPEN_RETRY_MS,
    STREAM_KINDS,
    SWEEP_COUNT_MIN,
    PrincipalUse,
    Quotas,
    charge,
)
from shalekv.v1 import kv_pb2

MESSAGE_BYTES_MAX = 1_000
LONG_UP_MS = 1e10  # some months after the start of the machine: floats are coarse there
GRANTED = 10_000


class Time:
    def __init__(self) -> None:
        self.now_ms = LONG_UP_MS

    def __call__(self) -> float:
        return self.now_ms

    def wait(self, duration_ms: float) -> None:
        self.now_ms += duration_ms


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def use_of(time: Time) -> Callable[[Quota], PrincipalUse]:
    quotas = Quotas(time, MESSAGE_BYTES_MAX)
    return lambda quota: quotas.use_of("token:alice", quota)


def refused(begin: Callable[[], object]) -> tuple[str, int]:
    """The name of the quota that refuses, and its advice."""
    with pytest.raises(QuotaExceeded) as error:
        begin()
    return error.value.quota, error.value.retry_after_ms


def call(use: PrincipalUse, size_bytes: int = 0, reply_bytes: int = 0) -> None:
    use.begin(size_bytes)
    use.end(size_bytes)
    use.send(reply_bytes)


def count_allowed(use: PrincipalUse) -> int:
    for number in range(GRANTED):
        try:
            call(use)
        except QuotaExceeded:
            return number
    return GRANTED


def test_calls_of_a_second_may_come_at_once(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """A bucket holds the calls of a second, and no more, however long nothing was called."""
    use = use_of(Quota(calls_per_s=40))
    assert count_allowed(use) == 40
    time.wait(500)
    assert count_allowed(use) == 20
    time.wait(1e9)
    assert count_allowed(use) == 40


@pytest.mark.parametrize("rate", [1, 3, 7, 40, 999, 1_000])
def test_the_advice_of_a_rate_is_exact(
    time: Time, use_of: Callable[[Quota], PrincipalUse], rate: int
) -> None:
    """A call is allowed after the advised delay, and not a millisecond before."""
    use = use_of(Quota(calls_per_s=rate))
    assert count_allowed(use) == rate
    for _ in range(50):
        name, advice_ms = refused(lambda: call(use))
        assert (name, advice_ms) == ("calls_per_s", -(-1_000 // rate))
        time.wait(advice_ms - 1)
        assert refused(lambda: call(use)) == (name, 1)
        time.wait(1)
        call(use)
        time.wait(1_000 / rate - advice_ms)  # so that fractions do not add up


def test_refused_calls_take_nothing(time: Time, use_of: Callable[[Quota], PrincipalUse]) -> None:
    """A caller that is refused many times waits no longer than one that was refused once."""
    use = use_of(Quota(calls_per_s=2, bytes_per_s=10_000))
    assert count_allowed(use) == 2
    for _ in range(100):
        assert refused(lambda: call(use)) == ("calls_per_s", 500)
    time.wait(1_000)
    use.begin(10_000)
    for _ in range(100):  # for their bytes, so that they take no call either
        assert refused(lambda: call(use, 10)) == ("bytes_per_s", 1)
    time.wait(1)
    call(use, 10)


def test_requests_count_when_they_begin_and_replies_when_they_end(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """A reply cannot be foreseen: it leaves a debt, for which the next call waits."""
    use = use_of(Quota(bytes_per_s=2_000))
    use.begin(1_500)
    assert refused(lambda: use.begin(600)) == ("bytes_per_s", 50)
    use.end(1_500)
    use.send(2_500)
    assert refused(lambda: use.begin(0)) == ("bytes_per_s", 1_000)
    time.wait(1_000)
    use.begin(0)
    assert refused(lambda: use.begin(500)) == ("bytes_per_s", 250)


def test_the_largest_message_fits_into_any_rate(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """A full bucket of bytes lets the largest message in, though it has more than a second's."""
    use = use_of(Quota(bytes_per_s=100))
    call(use, MESSAGE_BYTES_MAX)
    assert refused(lambda: call(use, 1)) == ("bytes_per_s", 10)
    time.wait(10_000)
    call(use, MESSAGE_BYTES_MAX)


def test_what_exceeds_the_bucket_leaves_a_debt(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """A request larger than the bucket is let in when that is full, and then owes the rest."""
    use = use_of(Quota(bytes_per_s=1_000))
    call(use, 1)
    assert refused(lambda: call(use, 3_000)) == ("bytes_per_s", 1)
    time.wait(1)
    call(use, 3_000)
    assert refused(lambda: call(use)) == ("bytes_per_s", 2_000)


def test_streams_wait_for_their_debt(time: Time, use_of: Callable[[Quota], PrincipalUse]) -> None:
    """What a stream sends counts, and is followed by a pause while the bucket is in debt."""
    use = use_of(Quota(bytes_per_s=1_000))
    assert use.send(1_000) == 0.0
    assert use.send(500) == pytest.approx(500)
    time.wait(500)
    assert use.send(250) == pytest.approx(250)
    assert use_of(Quota(calls_per_s=1)).send(1 << 30) == 0.0


def test_calls_in_flight_are_limited(use_of: Callable[[Quota], PrincipalUse]) -> None:
    """One more call than allowed is refused, until one of them ends."""
    use = use_of(Quota(calls_in_flight=2))
    use.begin(10)
    use.begin(20)
    assert refused(lambda: use.begin(0)) == ("calls_in_flight", IN_FLIGHT_RETRY_MS)
    use.end(20)
    use.begin(0)


def test_bytes_in_flight_are_limited(use_of: Callable[[Quota], PrincipalUse]) -> None:
    """Requests that wait have no more bytes than allowed; a larger one may be the only one."""
    use = use_of(Quota(bytes_in_flight=100))
    use.begin(60)
    use.begin(40)
    assert refused(lambda: use.begin(1)) == ("bytes_in_flight", IN_FLIGHT_RETRY_MS)
    use.end(40)
    assert refused(lambda: use.begin(500)) == ("bytes_in_flight", IN_FLIGHT_RETRY_MS)
    use.end(60)
    use.begin(500)
    assert refused(lambda: use.begin(1)) == ("bytes_in_flight", IN_FLIGHT_RETRY_MS)


@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_open_streams_are_limited_each_kind_by_itself(
    kind: str, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """One more stream of a kind than allowed is refused; other kinds are not."""
    use = use_of(replace(Quota(), **{kind: 2}))
    for _ in range(2):
        use.open(kind)
    assert refused(lambda: use.open(kind)) == (kind, OPEN_RETRY_MS)
    for other in set(STREAM_KINDS) - {kind}:
        use.open(other)
    use.close(kind)
    use.open(kind)


def test_a_stream_that_is_refused_has_no_place(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """What a rate refuses is not counted as open."""
    for request in (
        kv_pb2.ScanRequest(),
        kv_pb2.CountRequest(),
        kv_pb2.SessionRequest(),
        kv_pb2.WatchCreate(),
    ):
        use = use_of(Quota(calls_per_s=1, scans=1, sessions=1, watches=1))
        call(use)
        assert refused(partial(charge, use, request, 0))[0] == "calls_per_s"
        time.wait(1_000)
        held = charge(use, request, 0)
        assert held is not None
        held.end(None)
        time.wait(1_000)


def test_what_ends_gives_back_and_counts_its_reply(
    use_of: Callable[[Quota], PrincipalUse],
) -> None:
    """A reply counts as bytes or as a message; without a quota nothing is held."""
    get, reply = kv_pb2.GetRequest(key=b"k"), kv_pb2.GetReply(value=bytes(1_500))
    use = use_of(Quota(bytes_per_s=1_000, calls_in_flight=1))
    for outcome in (reply.SerializeToString(), reply):
        use.limit(Quota())
        use.limit(Quota(bytes_per_s=1_000, calls_in_flight=1))
        held = charge(use, get, 0)
        assert held is not None
        held.end(outcome)
        assert refused(lambda: call(use)) == ("bytes_per_s", reply.ByteSize() - 1_000)
    assert charge(use_of(Quota()), get, 0) is None


@pytest.mark.parametrize("name", [each.name for each in fields(Quota)])
def test_each_limit_of_a_quota_refuses(name: str, use_of: Callable[[Quota], PrincipalUse]) -> None:
    """No field of a quota is without effect, and each limits alone."""
    use = use_of(Quota(**{name: 1}))

    def work() -> None:
        for kind in STREAM_KINDS:
            use.open(kind)
        use.begin(MESSAGE_BYTES_MAX)

    work()
    assert use.is_limited
    assert refused(work)[0] == name
    assert not use_of(Quota()).is_limited
    work()


def test_a_change_of_the_policy_keeps_what_is_held(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """A new quota counts at once, with the calls in flight, open streams and debts of before."""
    use = use_of(Quota(calls_per_s=100, bytes_per_s=10_000, calls_in_flight=3))
    use.open("watches")
    use.begin(10_000)
    use.begin(0)
    assert use_of(Quota(calls_in_flight=2, watches=1)) is use
    assert refused(lambda: use.begin(0))[0] == "calls_in_flight"
    assert refused(lambda: use.open("watches"))[0] == "watches"
    use.end(10_000)
    use.begin(0)

    use = use_of(Quota(calls_per_s=100))
    assert count_allowed(use) == 100
    use_of(Quota(calls_per_s=10))
    assert refused(lambda: call(use)) == ("calls_per_s", 100)  # empty, whatever it holds
    time.wait(500)
    use_of(Quota(calls_per_s=1_000))
    assert count_allowed(use) == 500


def test_a_greater_rate_ends_a_debt_sooner(
    time: Time, use_of: Callable[[Quota], PrincipalUse]
) -> None:
    """Who owes much at a small rate does not wait for it at a great one."""
    use = use_of(Quota(bytes_per_s=1))
    call(use, MESSAGE_BYTES_MAX, reply_bytes=MESSAGE_BYTES_MAX)
    assert refused(lambda: call(use)) == ("bytes_per_s", 1_000 * MESSAGE_BYTES_MAX)
    use_of(Quota(bytes_per_s=10 * MESSAGE_BYTES_MAX))
    assert refused(lambda: call(use)) == ("bytes_per_s", 1_000)
    time.wait(1_000)
    call(use)


def test_principals_do_not_share(time: Time) -> None:
    """Each principal has its own use; anonymous callers are one principal."""
    quotas, quota = Quotas(time, MESSAGE_BYTES_MAX), Quota(calls_per_s=1)
    call(quotas.use_of("token:alice", quota))
    call(quotas.use_of("token:bob", quota))
    call(quotas.use_of("", quota))
    refused(lambda: call(quotas.use_of("", quota)))


def test_idle_principals_are_forgotten(time: Time) -> None:
    """Memory is that of those who use something, were they ever so many; they lose nothing."""
    quotas, quota = Quotas(time, MESSAGE_BYTES_MAX), Quota(calls_per_s=5)
    busy = [quotas.use_of("in flight", quota), quotas.use_of("watching", quota)]
    busy[0].begin(0)
    busy[1].open("watches")
    for use in busy:
        del use
    busy.clear()
    for number in range(20 * SWEEP_COUNT_MIN):
        call(quotas.use_of(f"token:{number}", quota))
        time.wait(1)  # a bucket is full again after 200 ms
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, PrincipalUse)]
    assert len(held) <= 2 * SWEEP_COUNT_MIN
    assert not quotas.use_of("in flight", quota).is_idle
    assert not quotas.use_of("watching", quota).is_idle


def test_a_connection_anew_does_not_fill_the_bucket(time: Time) -> None:
    """A principal whose callers have all gone is remembered until its bucket is full."""
    quotas, quota = Quotas(time, MESSAGE_BYTES_MAX), Quota(calls_per_s=1)
    call(quotas.use_of("token:alice", quota))
    for number in range(3 * SWEEP_COUNT_MIN):
        quotas.use_of(f"token:{number}", quota)
    gc.collect()
    refused(lambda: call(quotas.use_of("token:alice", quota)))


def test_callers_of_one_principal_share_even_if_it_was_forgotten(time: Time) -> None:
    """A caller keeps its use alive: a second caller gets the same one."""
    quotas, quota = Quotas(time, MESSAGE_BYTES_MAX), Quota(calls_per_s=1)
    use = quotas.use_of("token:alice", quota)
    for number in range(3 * SWEEP_COUNT_MIN):
        quotas.use_of(f"token:{number}", quota)
    assert quotas.use_of("token:alice", quota) is use
