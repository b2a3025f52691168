"""The bill of a server is that of its store, to the last digit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from shalekv.clock import LoopClock
from shalekv.telemetry.costs import BACKGROUND
from shalekv_client import Client
from tests.kit.constants import variables
from tests.kit.processes.bucket_troubles import TroubledBucket, troubled_bucket
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.kit.processes.scraping import fetched
from tests.servers.proxy import SLOW_DOWN
from tests.servers.s3 import S3Server

PRICES = {"write": "0.0054", "list": "0.0055", "read": "0.00037", "delete": "0.0001"}  # of 1,000
USD_PER_1000 = ",".join(f"{kind}s={usd}" for kind, usd in PRICES.items())
FLAGS = ("--metrics", "127.0.0.1:0", "--usd-per-1000", USD_PER_1000)
# Soon after the load, and not often.
COMPACTING = ("--wal-trigger-age-ms", "1", "--fence-poll-ms", "500")
QUICK = variables({"shalekv.cli.process.process_reports:REPORT_INTERVAL_MS": 50})
POLL_MS, WAITS_MAX = 50, 400
KEYS = [prefix + b"%d" % number for number in range(16) for prefix in (b"a/", b"b:", b"c")]


class Sample(NamedTuple):
    """One line of metrics, with the number as it is written."""

    name: str
    labels: Mapping[str, str]
    value: Decimal


def kind_of(request: str) -> str:
    """The kind by which a request of S3 is billed."""
    method, _, target = request.partition(" ")
    if method == "GET":  # of objects, or of uploads
        return "list" if "?list-type=2" in target or "?uploads" in target else "read"
    if method == "POST" and target.endswith("?delete"):
        return "delete"
    return {"PUT": "write", "POST": "write", "HEAD": "read", "DELETE": "delete"}[method]


async def scrape(server: Child) -> list[Sample]:
    """Read the metrics as Prometheus does, but for the conversion of numbers."""
    text = (await fetched(server, "/metrics")).text
    written = [line.rpartition(" ")[2] for line in text.splitlines() if line[0] != "#"]
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return [
        Sample(each.name.removeprefix("shalekv_"), each.labels, Decimal(value))
        for each, value in zip(samples, written, strict=True)
    ]


def sums(samples: Iterable[Sample], name: str, label: str) -> dict[str, Decimal]:
    """The sums of a family by one of its labels, without those of zero."""
    found = dict[str, Decimal]()
    for each in samples:
        if each.name == name and each.value:
            found[each.labels[label]] = found.get(each.labels[label], Decimal(0)) + each.value
    return found


async def settled(server: Child, bucket: TroubledBucket) -> tuple[list[Sample], Counter[str]]:
    """Wait until metrics have what the proxy has counted, and return both."""
    counted, billed = Counter[str](), dict[str, Decimal]()
    for _ in range(WAITS_MAX):
        counted, samples = Counter(map(kind_of, bucket.proxy.seen)), await scrape(server)
        billed = sums(samples, "store_billed_requests_total", "kind")
        if billed == counted:
            return samples, counted
        await LoopClock().sleep_ms(POLL_MS)
    raise AssertionError(f"billed are {billed}, and counted {counted}")


async def load(client: Client, bucket: TroubledBucket, server: Child) -> None:
    """Write, compact, and read from the levels; requests fail, and replies are lost."""
    bucket.proxy.answer(SLOW_DOWN, when="^PUT .*/wal/", times=1)
    bucket.proxy.lose_reply("^PUT .*/wal/")
    async with client.session() as session:
        for first in range(0, len(KEYS), 3):
            keys = KEYS[first : first + 3]
            await asyncio.gather(
                *(each.put(key, b"v") for key in keys for each in (client, session))
            )
    bucket.proxy.answer(SLOW_DOWN, when="^GET .*/levels/", times=1)
    for _ in range(WAITS_MAX):  # until gets have to read what was compacted
        await asyncio.gather(*(client.get(key) for key in KEYS))
        if "KV.Get" in sums(await scrape(server), "method_cost_dollars_total", "method"):
            break
        await LoopClock().sleep_ms(POLL_MS)
    await client.count(prefix=b"a/")
    [entry async for entry in client.scan()]


async def test_dollars_of_metrics_equal_requests_that_the_store_has_counted(
    processes: Processes, s3_server: S3Server
) -> None:
    """With compactor, collector, failures and repeats, whoever is charged: as decimal numbers."""
    async with troubled_bucket(s3_server) as bucket:
        env = {**bucket.env, **QUICK}
        server = await processes.serve(bucket.url, *FLAGS, *COMPACTING, env=env)
        async with Client(server.listen, coalesce=False) as client:
            await load(client, bucket, server)
        samples, counted = await settled(server, bucket)
        assert [rule.spent for rule in bucket.proxy.rules] == [1, 1, 1]
    prices = sums(samples, "store_price_dollars", "kind")
    assert prices == {kind: Decimal(usd) / 1_000 for kind, usd in PRICES.items()}
    dollars = sums(samples, "cost_dollars_total", "kind")
    assert dollars == {kind: count * prices[kind] for kind, count in counted.items()}
    by_role = sums(samples, "cost_dollars_total", "process")
    assert {*by_role} == {"writer", "compactor", "collector"}
    by_method = sums(samples, "method_cost_dollars_total", "method")
    assert {"KV.Get", "KV.Put", "Session.put", BACKGROUND} <= {*by_method}
    for dimension in ("method", "principal", "prefix"):
        by_origin = sums(samples, f"{dimension}_cost_dollars_total", dimension)
        assert sum(by_origin.values()) == by_role["writer"]
