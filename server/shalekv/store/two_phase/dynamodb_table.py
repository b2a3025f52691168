"""Makes the table of records in DynamoDB where there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting
from shalekv.store.two_phase.answers import Answer
from shalekv.store.two_phase.dynamodb_errors import NoAnswer

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient
    from types_aiobotocore_dynamodb.type_defs import TableDescriptionTypeDef

POLL_MS = 200.0
POLLS_MAX = 300  # a minute: making a table takes some seconds
KEYS = {"HASH": "database", "RANGE": "destination"}


async def ensure_table(
    opened: Callable[[], Awaitable[DynamoDBClient]], table: str, clock: Clock
) -> None:
    """Returns when the table can be used. Raises `FAILURES`, and `InvalidSetting`.

    `opened` gives a client whose credentials are good.
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
    raise NoAnswer(problem, Answer.NOT_DONE)


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
