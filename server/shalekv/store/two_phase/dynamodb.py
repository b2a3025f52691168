"""Records in a table of DynamoDB.

    database      partition key: the URL of the store
    destination   sort key: the name of the object
    source        the name of the temporary object
    committed     whether the destination has been made

So that all records of one database can be read without those of others. Reads are strongly
consistent; each change is one conditional request, sent once: whoever waits repeats it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import Destination, Record
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.requests import RequestCounts, RequestKind
from shalekv.store.two_phase.answers import Answer
from shalekv.store.two_phase.dynamodb_client import DynamoClient
from shalekv.store.two_phase.dynamodb_errors import FAILURES, answer_in, problem_in
from shalekv.store.two_phase.dynamodb_table import ensure_table
from shalekv.store.two_phase.records import (
    Inserted,
    InsertOutcome,
    InsertUnknown,
    Occupied,
    RecordStore,
)

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient

DELETES_AT_ONCE = 16
# Several of these are reserved words.
SOURCE = {"#source": "source"}
COMMITTED = {"#committed": "committed"}


class DynamoRecords(RecordStore):
    """The records in one table, which is made when it is first needed."""

    def __init__(self, table: str, runtime: Runtime, settings: StoreSettings) -> None:
        self.url = f"dynamodb://{table}"
        self.sent = RequestCounts()
        self._table = table
        self._runtime = runtime
        self._client = DynamoClient(settings)
        self._preparing = asyncio.Lock()
        self._is_prepared = False

    async def ensure_schema(self) -> None:
        async with self._preparing:
            if self._is_prepared:
                return
            try:
                await ensure_table(self._client.opened, self._table, self._runtime.clock)
            except FAILURES as error:
                raise self._error(error, "prepare", self._table) from None
            self._is_prepared = True

    async def insert(self, record: Record) -> InsertOutcome:
        try:
            client = await self._ready(RequestKind.RECORD_WRITE)
            await client.put_item(
                TableName=self._table,
                Item=_item(record),
                ConditionExpression="attribute_not_exists(#destination)",
                ExpressionAttributeNames={"#destination": "destination"},
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except FAILURES as error:
            answer = answer_in(error)
            if answer is Answer.UNKNOWN:
                return InsertUnknown(f"{self.url}: {problem_in(error, self.url)}")
            if answer is not Answer.CONFLICT:
                raise self._error(error, "insert", str(record.destination)) from None
            return await self._occupied(record, error)
        return Inserted()

    async def _occupied(self, record: Record, error: Exception) -> Occupied:
        item = error.response.get("Item") if isinstance(error, ClientError) else None
        if item:  # servers that are not Amazon's leave it out
            return Occupied(_record(record.destination.database, item))
        found = await self.find(record.destination)
        if found is None:
            problem = "another record was there, and is gone"
            raise StoreUnavailable(self.url, "insert", str(record.destination), problem)
        return Occupied(found)

    async def find(self, destination: Destination) -> Record | None:
        try:
            client = await self._ready(RequestKind.RECORD_READ)
            reply = await client.get_item(
                TableName=self._table, Key=_key(destination), ConsistentRead=True
            )
        except FAILURES as error:
            raise self._error(error, "find", str(destination)) from None
        item = reply.get("Item")
        return None if item is None else _record(destination.database, item)

    async def commit(self, record: Record) -> bool:
        return await self._update(
            "commit",
            record,
            update="SET #committed = :true",
            condition="#source = :old",
            values={":true": {"BOOL": True}},
        )

    async def take_over(self, record: Record, source: str) -> bool:
        return await self._update(
            "take_over",
            record,
            update="SET #source = :new",
            condition="#source = :old AND #committed = :false",
            values={":new": {"S": source}, ":false": {"BOOL": False}},
        )

    async def _update(
        self, operation: str, record: Record, *, update: str, condition: str, values: Any
    ) -> bool:
        used = {n: a for n, a in (SOURCE | COMMITTED).items() if n in f"{update} {condition}"}
        try:
            client = await self._ready(RequestKind.RECORD_WRITE)
            await client.update_item(
                TableName=self._table,
                Key=_key(record.destination),
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames=used,
                ExpressionAttributeValues={":old": {"S": record.source}, **values},
            )
        except FAILURES as error:
            if answer_in(error) is Answer.CONFLICT:
                return False
            raise self._error(error, operation, str(record.destination)) from None
        return True

    async def withdraw(self, record: Record) -> None:
        await self._delete(
            record.destination,
            "#source = :old AND #committed = :false",
            SOURCE | COMMITTED,
            {":old": {"S": record.source}, ":false": {"BOOL": False}},
        )

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        is_committed = "#committed = :true", COMMITTED, {":true": {"BOOL": True}}
        remaining = iter(destinations)
        while some := [*islice(remaining, DELETES_AT_ONCE)]:
            ended = await asyncio.gather(
                *(self._delete(each, *is_committed) for each in some), return_exceptions=True
            )
            for error in ended:
                if error is not None:
                    raise error

    async def _delete(
        self, destination: Destination, condition: str, names: dict[str, str], values: Any
    ) -> None:
        try:
            client = await self._ready(RequestKind.RECORD_WRITE)
            await client.delete_item(
                TableName=self._table,
                Key=_key(destination),
                ConditionExpression=condition,
                ExpressionAttributeNames=names,
                ExpressionAttributeValues=values,
            )
        except FAILURES as error:
            if answer_in(error) is not Answer.CONFLICT:
                raise self._error(error, "delete", str(destination)) from None

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[Record]:
        arguments: dict[str, Any] = {
            "KeyConditionExpression": "#database = :database",
            "ExpressionAttributeNames": {"#database": "database"},
            "ExpressionAttributeValues": {":database": {"S": database}},
        }
        if uncommitted_only:
            arguments["FilterExpression"] = "#committed = :false"
            arguments["ExpressionAttributeNames"] |= COMMITTED
            arguments["ExpressionAttributeValues"] |= {":false": {"BOOL": False}}
        while True:
            try:
                client = await self._ready(RequestKind.RECORD_READ)
                page = await client.query(TableName=self._table, ConsistentRead=True, **arguments)
            except FAILURES as error:
                raise self._error(error, "list", database) from None
            for item in page["Items"]:
                yield _record(database, item)
            if "LastEvaluatedKey" not in page:
                return
            arguments["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    async def close(self) -> None:
        await self._client.close()

    async def _ready(self, kind: RequestKind) -> DynamoDBClient:
        """The client, for one request of `kind`; raises `FAILURES` when there can be none."""
        await self.ensure_schema()
        client = await self._client.opened()
        self.sent.add(kind)
        return client

    def _error(self, error: Exception, operation: str, name: str) -> StoreError:
        problem = problem_in(error, self.url)
        if answer_in(error) is not Answer.REFUSED:
            return StoreUnavailable(self.url, operation, name, problem)
        return StoreRefused(self.url, operation, name, problem, may_pass=True)


def _key(destination: Destination) -> dict[str, Any]:
    return {"database": {"S": destination.database}, "destination": {"S": destination.name}}


def _item(record: Record) -> dict[str, Any]:
    rest = {"source": {"S": record.source}, "committed": {"BOOL": record.is_committed}}
    return _key(record.destination) | rest


def _record(database: str, item: Any) -> Record:
    destination = Destination(database, item["destination"]["S"])
    return Record(destination, item["source"]["S"], item["committed"]["BOOL"])
