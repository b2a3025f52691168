"""The calls of a client, a method for each.

`DataCalls` has those that read and write data, `AdminCalls` those of operators. What few programs
need is imported by the method that needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from shalekv_client import operations
from shalekv_client.operations import At, Method, Operation
from shalekv_client.policies import Destination, Durability, ReadLevel
from shalekv_client.results import Commit, Count, KeyInfo, TxnResult, Value

if TYPE_CHECKING:
    from shalekv.v1 import manifest_pb2
    from shalekv_client.admin import AccessPolicy, CallerAccess, Ingested, Snapshot
    from shalekv_client.changes import Change, Compare, Condition, TxnOperation
    from shalekv_client.routing.fleet import Fleet

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
ResultT = TypeVar("ResultT")

PER_FILE_MS = 20  # added to the timeout of a load: the writer checks each file before it commits


class DataCalls(ABC):
    """The methods of `Client` that send a single operation."""

    async def get(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> Value | None:
        """Return the value of `key`; None when it has none.

        The state that is read is not older than `max_staleness_ms`; 0 means no bound. With `at`,
        the id of a snapshot or an object that has it as `id`, the read is made at that snapshot.
        """
        operation = operations.get(
            key,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def describe(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> KeyInfo | None:
        """Return what is known of `key` without its value; None when it has none.

        The other arguments are as in `get`.
        """
        operation = operations.describe(
            key,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def exists(
        self,
        key: bytes,
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> bool:
        """Return whether `key` has a value, which is not sent. The arguments are as in `get`."""
        found = await self.describe(
            key,
            read_level=read_level,
            max_staleness_ms=max_staleness_ms,
            at=at,
            timeout_ms=timeout_ms,
        )
        return found is not None

    async def count(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        limit: int = 0,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> Count:
        """Count the keys from `start` to `end` (exclusive), or those that begin with `prefix`.

        The server counts them at one view, and sends only their number; without a range it counts
        all keys. The time that it takes grows with the number of keys. It ends at `limit` keys; 0
        means no limit. The other arguments are as in `get`.
        """
        operation = operations.count(
            start=start,
            end=end,
            prefix=prefix,
            limit=limit,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def batch_get(
        self,
        keys: Iterable[bytes],
        *,
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        timeout_ms: int | None = None,
    ) -> list[Value | None]:
        """Return the values of many keys, read at one view, in the order of `keys`.

        The value is None for a key that has none. `max_staleness_ms` and `at` are as in `get`.
        """
        operation = operations.batch_get(
            keys,
            read_level=read_level,
            max_staleness_ms=self._staleness_ms(max_staleness_ms, at),
            at=at,
            min_seq=self._min_seq(),
        )
        return await self._call(operation, timeout_ms)

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_ms: int = 0,
        condition: Condition | None = None,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Set the value of `key`, which expires after `ttl_ms` milliseconds; 0: never.

        When the `condition` does not hold, nothing is changed and `ConditionFailed` is raised.
        """
        operation = operations.put(
            key,
            value,
            ttl_ms=ttl_ms,
            condition=condition,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete(
        self,
        key: bytes,
        *,
        condition: Condition | None = None,
        count: bool = False,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete `key`. A key without a value is not an error. `condition` is as in `put`.

        With `count` the server reads the key, and `Commit.deleted` is 1 if it had a value, else 0.
        """
        operation = operations.delete(
            key,
            condition=condition,
            count=count,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def delete_range(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        all_keys: bool = False,
        count: bool = False,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Delete the keys from `start` to `end` (exclusive), or those that begin with `prefix`.

        The delete is one commit, whose cost does not depend on the number of keys. To delete all
        keys, give none of the three and set `all_keys`.

        With `count` the server reads up to 10,000 keys of the range, and `Commit.deleted` is the
        number of those that had a value; with `Commit.deleted_more` there may have been more.
        """
        operation = operations.delete_range(
            start=start,
            end=end,
            prefix=prefix,
            all_keys=all_keys,
            count=count,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    async def add(
        self,
        key: bytes,
        delta: int = 1,
        *,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Add `delta`, which may be negative, to a counter; return its new value.

        A counter is a value of 8 bytes, a signed integer, least significant byte first; a key
        without a value counts as 0. Raises `NotACounter` for another value, `CounterOverflow` for
        a sum beyond 64 bits.
        """
        operation = operations.add(key, delta, idempotency_key=self._key(idempotency_key))
        return await self._call(operation, timeout_ms)

    async def touch(
        self,
        key: bytes,
        ttl_ms: int = 0,
        *,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> bool:
        """Make the value of `key` expire after `ttl_ms` milliseconds from now on; 0: never.

        Returns whether the key has a value. The value stays as it is, but is written again: it gets
        the sequence number of the commit, and watches see a put.
        """
        operation = operations.touch(key, ttl_ms, idempotency_key=self._key(idempotency_key))
        return await self._call(operation, timeout_ms)

    async def write(
        self,
        changes: Iterable[Change],
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Commit:
        """Apply all of `changes`, such as a `Batch`, in one commit, or none of them."""
        key = self._key(idempotency_key)
        operation = operations.write(changes, durability=durability, idempotency_key=key)
        return await self._call(operation, timeout_ms)

    async def txn(
        self,
        compares: Iterable[Compare],
        then: Iterable[TxnOperation],
        otherwise: Iterable[TxnOperation] = (),
        *,
        durability: Durability = Durability.DURABLE,
        idempotency_key: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> TxnResult:
        """Execute the operations of `then` if all of `compares` hold, else those of `otherwise`.

            await client.txn([Missing(b"lock")], then=[Put(b"lock", me)], otherwise=[Get(b"lock")])

        Comparisons and operations are one commit. There is one result for each operation of the
        branch that was taken: for a `Get` the value, or None, from before the changes; for an `Add`
        the new value of the counter; for a `Touch` whether the key has a value; for other changes
        None.
        """
        operation = operations.txn(
            compares,
            then,
            otherwise,
            durability=durability,
            idempotency_key=self._key(idempotency_key),
        )
        return await self._call(operation, timeout_ms)

    @abstractmethod
    async def _call(self, operation: Operation[ResultT], timeout_ms: int | None) -> ResultT:
        """Send an operation and return its result."""

    @abstractmethod
    def _key(self, idempotency_key: bytes | None) -> bytes | None:
        """Return the idempotency key of a write: that of the caller, or a new one if it gave none.

        None: the write has no key, and so is not repeated.
        """

    @abstractmethod
    def _min_seq(self) -> int:
        """Return the sequence number that the view of a read must have reached."""

    @abstractmethod
    def _staleness_ms(self, max_staleness_ms: int | None, at: At) -> int:
        """Return the greatest age that the state of a read may have; 0: any age."""


class AdminCalls:
    """The calls of a client about snapshots, access and loads; see `Client`.

    Any server answers them; those of loads the writer.

    The argument `called` of `renew_snapshot` and `delete_snapshot` is the id (bytes) or the name
    (str) of the snapshot. They raise `SnapshotNotFound` when there is none.
    """

    address: str
    fleet: Fleet
    _timeout_ms: int
    _message_bytes_max: int

    async def create_snapshot(
        self,
        name: str = "",
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Keep the present state, which includes everything that was acknowledged before.

        The snapshot expires after `ttl_s` seconds, or is kept `forever`: give one of the two.
        Raises `SnapshotExists` when another snapshot has the name.
        """
        from shalekv_client import admin

        request = admin.CREATE_SNAPSHOT.request(name=name, ttl_s=ttl_s, forever=forever)
        # A repeat would create a second snapshot, or find the name in use by the first.
        reply = await self._ask(admin.CREATE_SNAPSHOT, request, timeout_ms, is_repeatable=False)
        return admin.snapshot_of(reply.snapshot)

    async def renew_snapshot(
        self,
        called: bytes | str,
        *,
        ttl_s: int = 0,
        forever: bool = False,
        timeout_ms: int | None = None,
    ) -> Snapshot:
        """Let an unexpired snapshot expire `ttl_s` seconds from now, or keep it `forever`."""
        from shalekv_client import admin

        request = admin.RENEW_SNAPSHOT.request(ttl_s=ttl_s, forever=forever)
        admin.name_snapshot(request, called)
        reply = await self._ask(admin.RENEW_SNAPSHOT, request, timeout_ms, is_repeatable=True)
        return admin.snapshot_of(reply.snapshot)

    async def list_snapshots(self, *, timeout_ms: int | None = None) -> list[Snapshot]:
        """Return the snapshots that have not expired, oldest first."""
        from shalekv_client import admin

        request = admin.LIST_SNAPSHOTS.request()
        reply = await self._ask(admin.LIST_SNAPSHOTS, request, timeout_ms, is_repeatable=True)
        return [admin.snapshot_of(each) for each in reply.snapshots]

    async def delete_snapshot(self, called: bytes | str, *, timeout_ms: int | None = None) -> None:
        """Delete a snapshot. The next collection deletes the objects that only it has kept."""
        from shalekv_client import admin

        request = admin.DELETE_SNAPSHOT.request()
        admin.name_snapshot(request, called)
        # A repeat would report that there is none when the first attempt has deleted it.
        await self._ask(admin.DELETE_SNAPSHOT, request, timeout_ms, is_repeatable=False)

    async def who_am_i(self, *, timeout_ms: int | None = None) -> CallerAccess:
        """Return who this client is for the server. Everybody may ask."""
        from shalekv_client import admin

        reply = await self._ask(
            admin.WHO_AM_I, admin.WHO_AM_I.request(), timeout_ms, is_repeatable=True
        )
        return admin.caller_of(reply)

    async def access_policy(self, *, timeout_ms: int | None = None) -> AccessPolicy:
        """Return the newest access policy. Needs the verb ADMIN."""
        from shalekv_client import admin

        reply = await self._ask(
            admin.GET_POLICY, admin.GET_POLICY.request(), timeout_ms, is_repeatable=True
        )
        return admin.policy_of(reply.policy)

    async def set_access_policy(
        self, policy: AccessPolicy, *, force: bool = False, timeout_ms: int | None = None
    ) -> int:
        """Replace the policy that has the version of `policy`; return the version of the new one.

        Needs the verb ADMIN. `force` stores an enforced policy by which nobody but the
        administrators of the servers' settings, or not this caller, has that verb; without it,
        `InvalidRequest` is raised. Raises `PolicyChanged` if another was stored since.
        """
        from shalekv_client import admin

        reply = await self._ask(
            admin.SET_POLICY,
            admin.SET_POLICY.request(policy=admin.policy_message(policy), force=force),
            timeout_ms,
            is_repeatable=False,  # a repeat would find the version of the first attempt
        )
        return reply.version

    async def _ask(
        self,
        method: Method[RequestT, ReplyT],
        request: RequestT,
        timeout_ms: int | None,
        *,
        is_repeatable: bool,
    ) -> ReplyT:
        return await self.fleet.unary(
            method,
            request,
            destination=Destination.BY_POLICY,
            is_repeatable=is_repeatable,
            timeout_ms=self._timeout_ms if timeout_ms is None else timeout_ms,
        )

    async def ingest(
        self,
        load_id: str,
        ssts: Iterable[manifest_pb2.SstInfo],
        *,
        timeout_ms: int | None = None,
    ) -> Ingested:
        """Commit files that are in the folder of the levels, listed in the order of their keys.

        They become one commit, newer than all writes before and older than all after. `load_id`,
        1 to 256 bytes, identifies the load: a load is committed once, however often the call is
        made, so an attempt without an answer is repeated. Ids of the form ``<stream>-<number>`` are
        batches, which are committed in order: when one is committed, all before it count as
        committed.

        The default of `timeout_ms` is the client's timeout and some more for each file. Raises
        `InvalidRequest`, whose `field` names the file that is missing or not as listed;
        `LeaseLost` when the files may have been collected; `LoadUnknown` when the load may have
        been committed longer ago than is remembered; and the errors of every write.
        """
        from shalekv_client import admin

        request = admin.INGEST.request(load_id=load_id, ssts=ssts)
        size_bytes = request.ByteSize()
        if size_bytes > self._message_bytes_max:
            from shalekv_client.error_table import too_large

            raise too_large(self.address, "IngestSst", size_bytes, self._message_bytes_max)
        if timeout_ms is None:
            timeout_ms = self._timeout_ms + PER_FILE_MS * len(request.ssts)
        elif timeout_ms <= 0:
            raise ValueError(f"timeout_ms must be positive, not {timeout_ms}")
        reply = await self.fleet.unary(
            admin.INGEST,
            request,
            destination=Destination.WRITER,
            is_repeatable=True,
            timeout_ms=timeout_ms,
        )
        return admin.ingested_of(reply)
