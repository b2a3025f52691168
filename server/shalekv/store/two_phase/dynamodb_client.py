"""botocore's client of DynamoDB, opened when it is first needed, with credentials that are good."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from shalekv.settings import StoreSettings
from shalekv.store.aws.discretion import keep_secrets_out_of_logs
from shalekv.store.aws.region import DEFAULT_REGION, REGION_VARIABLES
from shalekv.store.aws_credentials import find_credentials, renew_credentials
from shalekv.store.two_phase.answers import Answer
from shalekv.store.two_phase.dynamodb_errors import NoAnswer

if TYPE_CHECKING:
    from aiobotocore.credentials import AioCredentials
    from types_aiobotocore_dynamodb import DynamoDBClient

REQUEST_ID = "x-amzn-requestid"  # in each answer of DynamoDB
_FORBIDDEN = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})


class DynamoClient:
    """A client, and the credentials that it signs with."""

    def __init__(self, settings: StoreSettings) -> None:
        """Nothing is opened yet."""
        self._settings = settings
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: DynamoDBClient | None = None
        self._credentials: AioCredentials | None = None

    async def opened(self) -> DynamoDBClient:
        """The client, ready to sign. Whoever comes first opens it, the others wait for that.

        Raises `CredentialsFailed` and the errors of botocore. Nothing was sent then.
        """
        if self._client is None:
            async with self._opening:
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
        # A client that was made without any would never look again.
        self._credentials = await find_credentials(session)
        region = self._settings.region or session.get_config_variable("region")
        config = AioConfig(
            connect_timeout=self._settings.connect_timeout_ms / 1_000,
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

    botocore makes a success without any content of whatever a proxy answers with a 200: a record
    that was inserted, or one that is not there.
    """
    if REQUEST_ID in response_dict["headers"]:
        return
    status = response_dict["status_code"]
    answer = Answer.REFUSED if status in _FORBIDDEN else Answer.UNKNOWN
    problem = f"answered {status}, and not as DynamoDB does: is this its address, or a proxy's?"
    raise NoAnswer(problem, answer)
