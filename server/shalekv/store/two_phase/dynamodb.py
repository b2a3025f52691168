"""Records in a table of DynamoDB.

    database      partition key: the URL of the store
    destination   sort key: the name of the object
    source        the name of the temporary object
    committed     whether the destination has been made

With these keys, all records of one database can be read without those of others. Reads are
strongly consistent. Each change is one conditional request, sent once: the caller repeats it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from aiohttp import ClientConnectorCertificateError, ClientConnectorError
from aiohttp import ClientError as HttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    NoRegionError,
    ParamValidationError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting, StoreError, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import RequestCounts, RequestKind
from shalekv.store.aws_credentials import (
    CONFIGURATION,
    DEFAULT_REGION,
    REGION_VARIABLES,
    CredentialsFailed,
    find_credentials,
    keep_secrets_out_of_logs,
    masked,
    named,
    not_configured,
    renew_credentials,
)
from shalekv.store.retry import CONNECT_TIMEOUT_MS
from shalekv.store.two_phase.records import (
    Inserted,
    InsertOutcome,
    InsertUnknown,
    Occupied,
    RecordStore,
    StatementOutcome,
)

if TYPE_CHECKING:
    from aiobotocore.credentials import AioCredentials
    from types_aiobotocore_dynamodb import DynamoDBClient
    from types_aiobotocore_dynamodb.type_defs import TableDescriptionTypeDef


class NoAnswer(Exception):
    """A proxy answered in place of DynamoDB, or the table is not ready in time.

    The text is our own.
    """

    def __init__(self, problem: str, outcome: StatementOutcome) -> None:
        super().__init__(problem)
        self.outcome = outcome


FAILURES = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    HttpError,
    OSError,
    CredentialsFailed,
    NoAnswer,
)

SERVER_ERROR = 500
REQUEST_ID = "x-amzn-requestid"  # in each answer of DynamoDB
CONFLICT = "ConditionalCheckFailedException"
TRANSIENT = frozenset(
    {
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ResourceInUseException",
        "ResourceNotFoundException",  # the table is being created, or was deleted
        "SlowDown",
        "ThrottlingException",
        "TransactionConflictException",
    }
)
NEVER_SENT = (ConnectTimeoutError, ProxyConnectionError)
# aiobotocore raises EndpointConnectionError also for a connection that was cut: its cause differs.
NO_CONNECTION = (ClientConnectorError, socket.gaierror)
MISSING = (*CONFIGURATION, NoRegionError, ParamValidationError)
_FORBIDDEN = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})

POLL_MS = 200.0
POLLS_MAX = 300  # a minute: creating a table takes some seconds
KEYS = {"HASH": "database", "RANGE": "destination"}

PARALLEL_DELETES = 16
# Placeholders, since several of these names are reserved words.
SOURCE = {"#source": "source"}
COMMITTED = {"#committed": "committed"}


def outcome_of(error: Exception) -> StatementOutcome:
    """Return what `error`, one of `FAILURES`, says about the request that raised it.

    After a failure of the connection it is unknown whether the request was sent.
    """
    if isinstance(error, CredentialsFailed):
        return StatementOutcome.NOT_DONE if error.may_pass else StatementOutcome.REFUSED
    if isinstance(error, NoAnswer):
        return error.outcome
    if isinstance(error, MISSING):
        return StatementOutcome.REFUSED
    if isinstance(error, NEVER_SENT) or isinstance(_cause(error), NO_CONNECTION):
        return StatementOutcome.NOT_DONE
    if not isinstance(error, ClientError):
        return StatementOutcome.UNKNOWN
    status, code = _answered(error)
    if status >= SERVER_ERROR:
        return StatementOutcome.UNKNOWN
    if code == CONFLICT:
        return StatementOutcome.CONFLICT
    return StatementOutcome.NOT_DONE if code in TRANSIENT else StatementOutcome.REFUSED


def problem_of(error: Exception, place: str) -> str:
    """Describe an error in our own words: the original may hold tokens and signatures."""
    if isinstance(error, CredentialsFailed):
        return error.describe(place)
    if isinstance(error, NoAnswer):
        return str(error)
    if isinstance(error, CONFIGURATION):
        return not_configured(error, place)
    if isinstance(error, ClientError):
        status, code = _answered(error)
        said = masked(error.response.get("Error", {}).get("Message", ""))
        return f"answered {status} {code}" + (f": {said}" if said else "")
    cause = _cause(error)
    if isinstance(cause, ClientConnectorCertificateError):
        return "the server's certificate is not trusted: see AWS_CA_BUNDLE"
    if isinstance(cause, ClientConnectorError):
        return f"cannot connect: {cause.strerror or named(cause)}. Is it up, and its address right?"
    return f"the request broke off: {named(cause)}"


def _answered(error: ClientError) -> tuple[int, str]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR)
    return status, error.response.get("Error", {}).get("Code", "")


def _cause(error: Exception) -> Exception:
    """Return the error of aiohttp where botocore wraps one, else `error`."""
    inner = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    return inner if isinstance(inner, Exception) else error


class DynamoClient:
    """botocore's client of DynamoDB, opened on first use, and its credentials."""

    def __init__(self, settings: StoreSettings) -> None:
        """Open nothing yet."""
        self._settings = settings
        self._stack = AsyncExitStack()
        self._open_lock = asyncio.Lock()
        self._client: DynamoDBClient | None = None
        self._credentials: AioCredentials | None = None

    async def opened(self) -> DynamoDBClient:
        """Return the client, with valid credentials; the first call opens it.

        Raises `CredentialsFailed` and the errors of botocore; nothing was sent then.
        """
        if self._client is None:
            async with self._open_lock:
                if self._client is None:
                    self._client = await self._open()
        if self._credentials is not None:
            await renew_credentials(self._credentials)
        return self._client

    async def close(self) -> None:
        """Close its connections."""
        await self._stack.aclose()

    async def _open(self) -> DynamoDBClient:
        keep_secrets_out_of_logs()
        profile = self._settings.aws_profile or None
        session = AioSession(session_vars=REGION_VARIABLES, profile=profile)
        # A client that is created without credentials would never look for them again.
        self._credentials = await find_credentials(session)
        region = self._settings.region or session.get_config_variable("region")
        config = AioConfig(
            connect_timeout=CONNECT_TIMEOUT_MS / 1_000,
            read_timeout=self._settings.request_timeout_ms / 1_000,
            max_pool_connections=self._settings.connections_max,
            retries={"total_max_attempts": 1},
        )
        client: DynamoDBClient = await self._stack.enter_async_context(
            session.create_client(
                "dynamodb",
                region_name=region or DEFAULT_REGION,
                endpoint_url=self._settings.records_endpoint_url or None,
                config=config,
            )
        )
        client.meta.events.register("before-parse.dynamodb", _check_answer)
        return client


def _check_answer(response_dict: dict[str, Any], **_: Any) -> None:
    """Raise `NoAnswer` unless DynamoDB has answered.

    botocore treats any reply of a proxy with status 200 as a success without content: as a record
    that was inserted, or one that does not exist.
    """
    if REQUEST_ID in response_dict["headers"]:
        return
    status = response_dict["status_code"]
    outcome = StatementOutcome.REFUSED if status in _FORBIDDEN else StatementOutcome.UNKNOWN
    problem = f"answered {status}, and not as DynamoDB does: is this its address, or a proxy's?"
    raise NoAnswer(problem, outcome)


async def ensure_table(
    opened: Callable[[], Awaitable[DynamoDBClient]], table: str, clock: Clock
) -> None:
    """Create the table if there is none, and wait until it can be used.

    `opened` returns a client with valid credentials. Raises `FAILURES`, and `InvalidSetting` if it
    is a table of something else.
    """
    for _ in range(POLLS_MAX):
        client = await opened()
        found = await _describe(client, table)
        if found is None:
            await _create(client, table)
            continue
        _check_keys(found, table)
        if found.get("TableStatus", "ACTIVE") in {"ACTIVE", "UPDATING"}:
            return
        await clock.sleep_ms(POLL_MS)
    problem = f"the table is not active after {POLLS_MAX * POLL_MS / 1_000:.0f} s"
    raise NoAnswer(problem, StatementOutcome.NOT_DONE)


async def _describe(client: DynamoDBClient, table: str) -> TableDescriptionTypeDef | None:
    try:
        return (await client.describe_table(TableName=table))["Table"]
    except ClientError as error:
        if _code(error) == "ResourceNotFoundException":
            return None
        raise


async def _create(client: DynamoDBClient, table: str) -> None:
    try:
        await client.create_table(
            TableName=table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[
                {"AttributeName": "database", "AttributeType": "S"},
                {"AttributeName": "destination", "AttributeType": "S"},
            ],
            KeySchema=[
                {"AttributeName": "database", "KeyType": "HASH"},
                {"AttributeName": "destination", "KeyType": "RANGE"},
            ],
        )
    except ClientError as error:
        if _code(error) != "ResourceInUseException":  # another process was first
            raise


def _check_keys(found: TableDescriptionTypeDef, table: str) -> None:
    keys = {key["KeyType"]: key["AttributeName"] for key in found.get("KeySchema", ())}
    if keys != KEYS:
        raise InvalidSetting(
            f"dynamodb://{table} is a table of something else: its keys are {keys}, those of "
            f"records are {KEYS}. Name another table, which is made if there is none"
        )


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


class DynamoRecords(RecordStore):
    """The records in one table, which is created when it is first needed."""

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

    async def insert(self, record: CreateRecord) -> InsertOutcome:
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
            outcome = outcome_of(error)
            if outcome is StatementOutcome.UNKNOWN:
                return InsertUnknown(f"{self.url}: {problem_of(error, self.url)}")
            if outcome is not StatementOutcome.CONFLICT:
                raise self._error(error, "insert", str(record.destination)) from None
            return await self._occupied(record, error)
        return Inserted()

    async def _occupied(self, record: CreateRecord, error: Exception) -> Occupied:
        item = error.response.get("Item") if isinstance(error, ClientError) else None
        if item:  # servers other than Amazon's leave it out
            return Occupied(_record(record.destination.database, item))
        found = await self.find(record.destination)
        if found is None:
            problem = "another record was there, and is gone"
            raise StoreUnavailable(self.url, "insert", str(record.destination), problem)
        return Occupied(found)

    async def find(self, destination: Destination) -> CreateRecord | None:
        try:
            client = await self._ready(RequestKind.RECORD_READ)
            reply = await client.get_item(
                TableName=self._table, Key=_key(destination), ConsistentRead=True
            )
        except FAILURES as error:
            raise self._error(error, "find", str(destination)) from None
        item = reply.get("Item")
        return None if item is None else _record(destination.database, item)

    async def commit(self, record: CreateRecord) -> bool:
        return await self._update(
            "commit",
            record,
            update="SET #committed = :true",
            condition="#source = :old",
            values={":true": {"BOOL": True}},
        )

    async def take_over(self, record: CreateRecord, source: str) -> bool:
        return await self._update(
            "take_over",
            record,
            update="SET #source = :new",
            condition="#source = :old AND #committed = :false",
            values={":new": {"S": source}, ":false": {"BOOL": False}},
        )

    async def _update(
        self, operation: str, record: CreateRecord, *, update: str, condition: str, values: Any
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
            if outcome_of(error) is StatementOutcome.CONFLICT:
                return False
            raise self._error(error, operation, str(record.destination)) from None
        return True

    async def withdraw(self, record: CreateRecord) -> None:
        await self._delete(
            record.destination,
            "#source = :old AND #committed = :false",
            SOURCE | COMMITTED,
            {":old": {"S": record.source}, ":false": {"BOOL": False}},
        )

    async def delete_committed(self, destinations: Iterable[Destination]) -> None:
        is_committed = "#committed = :true", COMMITTED, {":true": {"BOOL": True}}
        remaining = iter(destinations)
        while some := [*islice(remaining, PARALLEL_DELETES)]:
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
            if outcome_of(error) is not StatementOutcome.CONFLICT:
                raise self._error(error, "delete", str(destination)) from None

    async def list(self, database: str, *, uncommitted_only: bool) -> AsyncIterator[CreateRecord]:
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
        """Count one request of `kind`, and return the client for it. Raises `FAILURES`."""
        await self.ensure_schema()
        client = await self._client.opened()
        self.sent.add(kind)
        return client

    def _error(self, error: Exception, operation: str, name: str) -> StoreError:
        problem = problem_of(error, self.url)
        if outcome_of(error) is not StatementOutcome.REFUSED:
            return StoreUnavailable(self.url, operation, name, problem)
        return StoreRefused(self.url, operation, name, problem, may_pass=True)


def _key(destination: Destination) -> dict[str, Any]:
    return {"database": {"S": destination.database}, "destination": {"S": destination.name}}


def _item(record: CreateRecord) -> dict[str, Any]:
    rest = {"source": {"S": record.source}, "committed": {"BOOL": record.is_committed}}
    return _key(record.destination) | rest


def _record(database: str, item: Any) -> CreateRecord:
    destination = Destination(database, item["destination"]["S"])
    return CreateRecord(destination, item["source"]["S"], item["committed"]["BOOL"])
