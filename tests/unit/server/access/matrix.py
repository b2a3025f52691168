"""Sends the requests of all sites as all principals, over a socket, and tells what was refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from shalekv.protocol.access import ALL_KEYS, Grant, Policy, Role, Rule, Verb
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.store.memory import MemoryStore
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.processes.guarded import GuardedServer, Metadata, TokenBook, guarded_writer
from tests.unit.server.access.sites import Site

MINE, OTHER = b"p/", b"q/"
THERE, MISSING, OUTSIDE = b"p/there", b"p/missing", b"z/there"
VALUE = b"a-value-that-nobody-may-see"
KEY_VERBS = frozenset(Verb) - {Verb.ADMIN}
ANONYMOUS, ROOT = "", "root"
DENIED, UNKNOWN = "PERMISSION_DENIED", "UNAUTHENTICATED"
CALL_S = 20.0
# What grpc.aio says in place of the status, if that arrives while it writes a message.
CUT_OFF = "Internal error from Core"


class Outcome(NamedTuple):
    """The answer to a caller: the code and message of a refusal, or empty texts."""

    code: str
    message: str


ALLOWED = Outcome("", "")


def _held() -> Mapping[str, frozenset[Verb]]:
    """The verbs of each principal on the keys of `MINE`, and ADMIN."""
    everything = frozenset(Verb)
    held = {ANONYMOUS: frozenset[Verb](), "stranger": frozenset[Verb](), "wrong": frozenset[Verb]()}
    held |= {"prefix": KEY_VERBS, ROOT: everything}
    held |= {f"only-{verb}": frozenset((verb,)) for verb in Verb}
    return held | {f"all-but-{verb}": everything - {verb} for verb in Verb}


HELD = _held()


def policy() -> Policy:
    """The policy that gives the principals what `HELD` says; `wrong` has other keys."""
    roles = [Role("wrong", (Rule(KEY_VERBS, _prefixed(OTHER)),))]
    for name, verbs in HELD.items():
        rules = [Rule(verbs & KEY_VERBS, _prefixed(MINE))] if verbs & KEY_VERBS else []
        rules += [Rule(frozenset((Verb.ADMIN,)), ALL_KEYS)] if Verb.ADMIN in verbs else []
        if rules and name != ROOT:
            roles.append(Role(name, tuple(rules)))
    grants = [Grant(f"token:{role.name}", (role.name,)) for role in roles]
    grants.append(Grant(f"token:{ROOT}", ("root",)))
    return Policy(is_enforced=True, roles=tuple(roles), grants=tuple(grants))


def may(name: str, site: Site, key: bytes) -> bool:
    """Return whether the rule of a site lets a principal name a key there."""
    needed, held = site.needed, HELD[name]
    if needed is None or name == ROOT:
        return True
    if not needed:
        return bool(held) or name == "wrong"
    is_mine = key.startswith(MINE) or not site.names_keys
    return needed <= held and is_mine


def _prefixed(prefix: bytes) -> KeyRange:
    return KeyRange(prefix, prefix_end(prefix))


@asynccontextmanager
async def guarded_database(
    store: MemoryStore, tokens: TokenBook, **server: Any
) -> AsyncIterator[Callers]:
    """A database with the policy of the matrix, and a value inside and outside of `MINE`."""
    for name in filter(None, HELD):
        tokens.add(name)
    async with guarded_writer(store, tokens, server=server) as served:
        await served.set_policy(policy())
        async with grpc.aio.insecure_channel(served.listen) as channel:
            callers = Callers(served, channel, tokens)
            for key in (THERE, OUTSIDE):
                await callers.kv.Put(
                    kv_pb2.PutRequest(key=key, value=VALUE), metadata=callers.shown(ROOT)
                )
            yield callers


class Callers:
    """The principals of the matrix, at one server."""

    def __init__(self, served: GuardedServer, channel: grpc.aio.Channel, tokens: TokenBook) -> None:
        self.served = served
        self.kv = kv_pb2_grpc.KVStub(channel)
        self.shown = tokens.shown
        self._channel = channel

    async def state(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """The newest commit, and everything that there is."""
        scan = self.kv.Scan(kv_pb2.ScanRequest(), metadata=self.shown(ROOT))
        replies = [reply async for reply in scan]
        return replies[0].header.seq, [(e.key, e.value) for r in replies for e in r.entries]

    async def ask(self, name: str, sites: Iterable[Site], key: bytes) -> Mapping[Site, Outcome]:
        """Name the key at each site as this principal."""
        found = [*sites]
        session = [site for site in found if site.method.name == "Session"]
        watch = [site for site in found if site.method.name == "Watch"]
        single = [site for site in found if site not in session and site not in watch]
        metadata = self.shown(name)
        async with asyncio.timeout(CALL_S):
            outcomes = await asyncio.gather(
                *(self._call(site.rpc, site.request(key), metadata) for site in single)
            )
            requests = [site.request(key) for site in session]
            return (
                dict(zip(single, outcomes, strict=True))
                | dict(zip(session, await self.session(requests, metadata), strict=True))
                | dict(zip(watch, await self._watch(watch, key, metadata), strict=True))
            )

    async def goes_on(self, rest: kv_pb2.ScanRequest, name: str) -> bool:
        """Return whether a page token is accepted of a principal, or else is invalid."""
        try:
            replies = [reply async for reply in self.kv.Scan(rest, metadata=self.shown(name))]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return False
            raise
        return bool(replies)

    async def _call(self, rpc: str, request: Message, metadata: Metadata) -> Outcome:
        data = request.SerializeToString()
        stream: Any = self._channel.unary_stream(rpc)  # of a call with one reply, too
        try:
            async for _ in stream(data, metadata=metadata):
                pass
        except grpc.aio.AioRpcError as error:
            return _outcome(error)
        return ALLOWED

    async def session(self, requests: Sequence[Any], metadata: Metadata) -> list[Outcome]:
        """Send operations, each of a request of its own, as one session."""
        operations = [each.operations[0] for each in requests]
        for number, operation in enumerate(operations, 1):
            operation.id = number
        if not operations:
            return []
        call = self.kv.Session(
            iter([kv_pb2.SessionRequest(operations=operations)]), metadata=metadata
        )
        try:
            results = {result.id: result async for reply in call for result in reply.results}
        except grpc.aio.AioRpcError as error:
            return [_outcome(error)] * len(operations)
        return [_of_error(results[number].error) for number in range(1, len(operations) + 1)]

    async def _watch(self, sites: Sequence[Site], key: bytes, metadata: Metadata) -> list[Outcome]:
        if not sites:
            return []
        call = self.kv.Watch(metadata=metadata)
        outcomes: dict[int, Outcome] = {}
        try:
            for number, site in enumerate(sites):
                request: Any = site.request(key)
                request.create.watch_id = number
                await call.write(request)
            while len(outcomes) < len(sites):
                reply = await call.read()
                assert isinstance(reply, kv_pb2.WatchReply)
                outcomes.setdefault(reply.watch_id, _of_error(reply.closed))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AssertionError):
            code, message = await call.code(), await call.details()
            if message == CUT_OFF:
                return await self._watch(sites, key, metadata)
            return [Outcome(code.name, message or "")] * len(sites)
        finally:
            call.cancel()
        return [outcomes[number] for number in range(len(sites))]


def _outcome(error: grpc.aio.AioRpcError) -> Outcome:
    return _refused(error.code().name, error.details() or "")


def _of_error(error: kv_pb2.OperationError) -> Outcome:
    return _refused(error.reason, error.message)


def _refused(code: str, message: str) -> Outcome:
    return Outcome(code, message) if code in (DENIED, UNKNOWN) else ALLOWED


async def holes(
    callers: Callers, sites: Sequence[Site], names: Iterable[str] = tuple(HELD)
) -> list[str]:
    """Return what was not refused but had to be, changed something, or revealed something."""
    found: list[str] = []
    before = await callers.state()
    for name in names:
        told: dict[Site, set[Outcome]] = {}
        for key in (THERE, MISSING, OUTSIDE):
            denied = [site for site in sites if not may(name, site, key)]
            for site, outcome in (await callers.ask(name, denied, key)).items():
                if outcome.code != (DENIED if name else UNKNOWN):
                    found.append(f"{name or 'anonymous'}: {site.label} of {key!r}: not refused")
                if key in (THERE, MISSING):
                    told.setdefault(site, set()).add(outcome)
        found += [
            f"{name}: {site.label} tells what is there" for site in told if len(told[site]) > 1
        ]
    if await callers.state() != before:
        found.append("a refused request has changed something")
    return found


async def foreign_tokens(callers: Callers) -> list[str]:
    """The principals that could go on with a scan of another one, by its page token."""
    keys = kv_pb2.KeyRange(prefix=MINE)
    for key in (THERE, MISSING):
        await callers.kv.Put(kv_pb2.PutRequest(key=key), metadata=callers.shown(ROOT))
    begin = kv_pb2.ScanRequest(range=keys, limit=1)
    scan = callers.kv.Scan(begin, metadata=callers.shown("prefix"))
    page_token = [reply async for reply in scan][-1].page_token
    assert page_token
    rest = kv_pb2.ScanRequest(range=keys, page_token=page_token)
    found = [name for name in (ROOT, "only-read", "prefix") if await callers.goes_on(rest, name)]
    assert found.pop() == "prefix"
    return found
