"""Every RPC, operation and field that names keys, for every verb and kind of principal.

The requests are found in the protos, and sent to a real writer over a socket. A refused one changes
nothing, and its refusal is the same whether the key is there or not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shalekv.errors import InvalidRequest
from shalekv.protocol.access import ALL_KEYS, Need, Verb
from shalekv.protocol.entry import KeyRange
from shalekv.server import requests
from shalekv.server.access.needs import TABLE, needs_of, range_of
from shalekv.v1 import kv_pb2
from tests.kit.processes.guarded import TokenBook
from tests.kit.processes.in_process import memory_store
from tests.unit.server.access.matrix import (
    ALLOWED,
    HELD,
    MINE,
    OUTSIDE,
    THERE,
    guarded_database,
    holes,
    may,
)
from tests.unit.server.access.sites import NO_KEYS, RULES, sites

SITES = [*sites()]


def test_every_place_has_a_rule() -> None:
    """A new RPC, operation, key or range fails this test until a rule says what it needs."""
    assert {site.label for site in SITES} == RULES.keys()
    assert all(NO_KEYS.values())


def test_every_request_has_an_entry() -> None:
    """The table of needs has the requests of all RPCs, and those in sessions and streams."""
    requests_of_rpcs = {site.method.input_type.full_name for site in SITES}
    requests_of_rpcs.add(kv_pb2.WatchCreate.DESCRIPTOR.full_name)
    assert {kind.DESCRIPTOR.full_name for kind in TABLE} == requests_of_rpcs


@pytest.mark.parametrize("wire", ["native", "grpcio"])
async def test_refusals(tmp_path: Path, wire: str) -> None:
    """What a principal may not do is refused, for all of them; grpcio shows it for some."""
    names = HELD if wire == "native" else ("", "stranger", "prefix", "only-read")
    async with guarded_database(memory_store(), TokenBook(tmp_path), wire=wire) as callers:
        assert await holes(callers, SITES, names) == []


async def test_permissions(tmp_path: Path) -> None:
    """What a principal may do is not refused."""
    async with guarded_database(memory_store(), TokenBook(tmp_path)) as callers:
        for name in HELD:
            for key in (THERE, OUTSIDE):
                allowed = [site for site in SITES if may(name, site, key)]
                outcomes = await callers.ask(name, allowed, key)
                refused = {site.label: each for site, each in outcomes.items() if each != ALLOWED}
                assert refused == {}, (name, key)


async def test_the_prefix_of_a_role_is_exact(tmp_path: Path) -> None:
    """Ranges that reach beyond it by one key are refused as a whole; inside it none is."""
    store = memory_store()
    inside = [(b"p/", b"p0"), (b"p/", b"p/\xff"), (b"p/a", b"p/b")]
    beyond = [(b"p/", b"p0\0"), (b"p.", b"p/z"), (b"o", b"q"), (b"p/", b""), (b"", b"p/z")]
    async with guarded_database(store, TokenBook(tmp_path)) as callers:
        shown, before = callers.shown("prefix"), await callers.state()
        for start, end in beyond:
            keys = kv_pb2.KeyRange(start=start, end=end)
            change = kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=keys))
            put = kv_pb2.Change(put=kv_pb2.PutChange(key=b"p/new", value=b"1"))
            write = kv_pb2.WriteRequest(changes=[put, change])
            operation = kv_pb2.SessionOperation(write=write)
            refused = await callers.session([kv_pb2.SessionRequest(operations=[operation])], shown)
            assert refused[0].code == "PERMISSION_DENIED", (start, end)
        assert await callers.state() == before, "nothing was applied, not even in part"
        for start, end in inside:
            keys = kv_pb2.KeyRange(start=start, end=end)
            async for reply in callers.kv.Scan(kv_pb2.ScanRequest(range=keys), metadata=shown):
                assert all(entry.key.startswith(MINE) for entry in reply.entries)


@pytest.mark.parametrize(
    "message",
    [
        kv_pb2.KeyRange(),
        kv_pb2.KeyRange(start=b"b", end=b"a"),
        kv_pb2.KeyRange(start=b"b", end=b"b"),
        kv_pb2.KeyRange(prefix=b"a", start=b"b"),
        kv_pb2.KeyRange(prefix=b"a", end=b"b"),
        kv_pb2.KeyRange(prefix=b"\xff\xff"),
        kv_pb2.KeyRange(prefix=b"a\xff"),
        kv_pb2.KeyRange(end=b"a"),
        kv_pb2.KeyRange(start=b"a"),
    ],
    ids=lambda message: str(message).replace("\n", " ").strip() or "all",
)
def test_a_need_is_never_narrower_than_the_work(message: kv_pb2.KeyRange) -> None:
    """A range that the service accepts is covered; a malformed one needs a key at least."""
    needed = range_of(message)
    assert not needed.is_empty
    try:
        done = requests.key_range(message)
    except InvalidRequest:
        assert needed == ALL_KEYS
        return
    assert needed.start <= done.start
    assert not needed.end or (done.end and done.end <= needed.end)


def test_deleting_everything_needs_everything() -> None:
    """The flag `all` counts whatever the range beside it says."""
    keys = kv_pb2.KeyRange(prefix=b"p/")
    request = kv_pb2.DeleteRangeRequest(range=keys, all=True)
    assert needs_of(request) == (Need(Verb.DELETE_RANGE, ALL_KEYS),)
    both = kv_pb2.Compare(key=b"p/1", range_empty=keys)
    assert needs_of(kv_pb2.TxnRequest(compares=[both])) == [Need(Verb.READ, ALL_KEYS)]


def test_a_file_needs_all_its_keys() -> None:
    """From the first to the last, both included; with the last below the first, all keys."""
    site = next(site for site in SITES if site.label == "IngestSst ssts.last_key")
    request = site.request(b"p/z")
    request.ssts[0].first_key = b"p/a"  # type: ignore[attr-defined]
    assert needs_of(request) == [Need(Verb.INGEST, KeyRange(b"p/a", b"p/z\0"))]
    request.ssts[0].first_key = b"q"  # type: ignore[attr-defined]
    assert needs_of(request) == [Need(Verb.INGEST, ALL_KEYS)]


def test_the_documentation_has_the_rules() -> None:
    """Its table has the needs of each field, apart from those of sessions, which are the same."""
    page = (Path(__file__).parents[4] / "server" / "docs" / "access.md").read_text()
    table = page.partition("\n| request and field | needs |\n|---|---|\n")[2].partition("\n\n")[0]
    documented = dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", table, re.MULTILINE))
    single = {label: rule for label, rule in RULES.items() if not label.startswith("Session ")}
    assert documented.keys() == single.keys()
    for label, verbs in single.items():
        assert {*re.findall("`(.*?)`", documented[label])} == {*map(str, verbs or ())}, label
