"""The election in Kubernetes: one Lease, which is renewed by replacing it.

A Lease says who holds it and how long it lasts without being renewed. A holder replaces it in order
to renew it. A candidate replaces it when it has seen it unchanged for as long as it lasts, by its
own clock. Both name the version that they have read, and the API server refuses the slower one. The
times in a Lease are there for people and other programs. They are never compared with a clock here:
the clocks of two machines differ.

Other programs that elect with Leases do the same, so a Lease that one of them holds is respected.
"""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlunsplit

import structlog
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
)

from shalekv.clock import Clock
from shalekv.errors import InvalidSetting
from shalekv.format.election import NONCE_BYTES
from shalekv.protocol.lease import (
    RENEWALS,
    ElectionLease,
    Sighting,
    look_wait_ms,
    poll_wait_ms,
    sight,
)
from shalekv.runtime import Runtime
from shalekv.server.election.elector import KubernetesPlace, Tenure, Told, check_namespace

# --- kubernetes_api
# Requests to the API server of Kubernetes about one Lease, with the credentials of a pod.
#
# Kubernetes replaces the token and the certificates of a pod while it runs, so both are read for
# each request. What the API server answers becomes one of three things:
#
#     a Lease, or None     done, or not done because the Lease is another one than was expected
#     KubernetesSilent     nobody knows what was done, or it may go better later
#     InvalidSetting       trying again does not mend it: no such namespace, no permission


API_VERSION = "coordination.k8s.io/v1"
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
TOKEN_FILE, CA_FILE, NAMESPACE_FILE = "token", "ca.crt", "namespace"
# The verbs of a Role, and the method of each.
GET, CREATE, UPDATE = "get", "create", "update"
METHODS: Mapping[str, str] = {GET: "GET", CREATE: "POST", UPDATE: "PUT"}

# These mean that the request was allowed, whatever became of it.
_ALLOWED = frozenset({200, 201, 404, 409})
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_REFUSED = range(400, 500)

Document = Mapping[str, Any]


class KubernetesSilent(Exception):
    """The API server has not answered in time, or not as it should."""

    def __init__(self, problem: str, *, wait_ms: float = 0.0) -> None:
        """`wait_ms` is how long the API server wants to be left alone."""
        super().__init__(problem)
        self.wait_ms = wait_ms


@dataclass(frozen=True, slots=True)
class KubernetesLease:
    """A Lease as the API server has it."""

    document: Document

    @property
    def spec(self) -> Document:
        """Holder, times and duration; empty in a Lease that was made by hand."""
        return self.document.get("spec") or {}

    @property
    def holder(self) -> str:
        """The identity of the holder; empty if there is none."""
        return str(self.spec.get("holderIdentity") or "")

    @property
    def ttl_ms(self) -> int | None:
        """How long it lasts without being renewed, if it says so."""
        seconds = self.spec.get("leaseDurationSeconds")
        return seconds * 1_000 if isinstance(seconds, int) and seconds > 0 else None

    @property
    def transitions(self) -> int:
        """How often it has changed hands."""
        count = self.spec.get("leaseTransitions")
        return count if isinstance(count, int) else 0

    def changed(self, **fields: Any) -> Document:
        """The same Lease with other fields in its `spec`; what others have added stays."""
        return {**self.document, "spec": {**self.spec, **fields}}


class Credentials:
    """Token and certificates of a service account."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where Kubernetes keeps the files up to date. Raises `InvalidSetting`."""
        self._folder = folder
        self._ca = ""
        self._context: ssl.SSLContext | None = None
        try:
            self.read()
        except KubernetesSilent as error:
            raise InvalidSetting(
                f"--elect kubernetes:// needs the credentials of a service account: {error}. Has "
                "the pod a service account, and automountServiceAccountToken not set to false?"
            ) from error

    def read(self) -> tuple[str, ssl.SSLContext]:
        """The token, and what verifies the API server. Raises `KubernetesSilent`."""
        token, ca = self._text_of(TOKEN_FILE), self._text_of(CA_FILE)
        if self._context is None or ca != self._ca:
            try:
                context = ssl.create_default_context(cadata=ca)
            except (ssl.SSLError, ValueError) as error:
                problem = f"{self._folder / CA_FILE} holds no certificate: {error}"
                raise KubernetesSilent(problem) from error
            # Certificates of clusters may lack key identifiers, which newer Pythons ask for.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            self._ca, self._context = ca, context
        return token, self._context

    def namespace(self) -> str:
        """That of the pod. Raises `InvalidSetting`."""
        try:
            return check_namespace(self._text_of(NAMESPACE_FILE))
        except KubernetesSilent as error:
            raise InvalidSetting(f"--elect kubernetes:///NAME: {error}; name one") from error

    def _text_of(self, name: str) -> str:
        """A file, which is short and in memory. Raises `KubernetesSilent`."""
        path = self._folder / name
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise KubernetesSilent(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise KubernetesSilent(f"{path} is not text") from error
        if not text:
            raise KubernetesSilent(f"{path} is empty")
        return text


class KubernetesLeases:
    """One Lease at the API server: read, created, and replaced as long as it is the same."""

    def __init__(
        self, session: ClientSession, credentials: Credentials, server: str, place: KubernetesPlace
    ) -> None:
        """`server` is HOST:PORT of the API server; `place` names the namespace."""
        self._session = session
        self._credentials = credentials
        self._server = server
        self._place = place
        self._granted: set[str] = set()  # verbs that were allowed once

    async def get(self) -> KubernetesLease | None:
        """The Lease; None: there is none."""
        status, document = await self._ask(GET)
        return None if status == HTTPStatus.NOT_FOUND else _lease(document)

    async def create(self, spec: Document) -> KubernetesLease | None:
        """Create it; None: there is one already."""
        metadata = {"name": self._place.name, "namespace": self._place.namespace}
        body = {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}
        status, document = await self._ask(CREATE, body)
        if status == HTTPStatus.NOT_FOUND:
            namespace = self._place.namespace
            raise InvalidSetting(
                f"--elect: no Lease can be created in the namespace {namespace} of Kubernetes, "
                f"which may not exist: {_message(document)}"
            )
        return None if status == HTTPStatus.CONFLICT else _lease(document)

    async def replace(self, changed: Document) -> KubernetesLease | None:
        """Replace the Lease that this was made of; None: it is not that one any more."""
        status, document = await self._ask(UPDATE, changed)
        is_another = status in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}
        return None if is_another else _lease(document)

    async def _ask(self, verb: str, body: Document | None = None) -> tuple[int, Document]:
        """The status and the document of an answer that is one of `_ALLOWED`."""
        status, document, wait_ms = await self._send(verb, body)
        said = f"{self._server} has answered {status}: {_message(document)}"
        if status in _ALLOWED and document.get("kind") in {"Lease", "Status"}:
            self._granted.add(verb)
            return status, document
        match status:
            case HTTPStatus.UNAUTHORIZED:
                is_mended_later = bool(self._granted)  # it has accepted a token before
            case HTTPStatus.FORBIDDEN:
                is_mended_later = verb in self._granted
            case _:
                is_mended_later = status in _LATER | _ALLOWED or status not in _REFUSED
        if is_mended_later:
            raise KubernetesSilent(said, wait_ms=wait_ms)
        raise InvalidSetting(self._refusal(verb, status, said))

    async def _send(self, verb: str, body: Document | None) -> tuple[int, Document, float]:
        token, context = self._credentials.read()
        path = f"/apis/{API_VERSION}/namespaces/{self._place.namespace}/leases"
        if verb != CREATE:
            path += f"/{self._place.name}"
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        try:
            async with self._session.request(
                METHODS[verb],
                urlunsplit(("https", self._server, path, "", "")),
                headers=headers,
                json=body,
                ssl=context,
                allow_redirects=False,
            ) as reply:
                wait_ms = _retry_after_ms(reply.headers.get("Retry-After", ""))
                return reply.status, _document(await reply.read()), wait_ms
        except (ClientError, OSError, ValueError) as error:
            raise KubernetesSilent(f"{self._server} does not answer: {_why(error)}") from error

    def _refusal(self, verb: str, status: int, said: str) -> str:
        match status:
            case HTTPStatus.UNAUTHORIZED:
                return f"--elect: Kubernetes does not accept the token of this pod: {said}"
            case HTTPStatus.FORBIDDEN:
                return (
                    f"--elect: Kubernetes forbids to {verb} leases.coordination.k8s.io in the "
                    f"namespace {self._place.namespace}. A Role of that namespace must allow "
                    f"{', '.join(METHODS)} of leases in the API group coordination.k8s.io, and a "
                    f"RoleBinding must give it to the service account of this pod: {said}"
                )
            case _:
                return f"--elect: Kubernetes refuses to {verb} the Lease: {said}"


@asynccontextmanager
async def open_leases(
    place: KubernetesPlace,
    environment: Mapping[str, str],
    credentials_path: str,
    *,
    timeout_ms: float,
) -> AsyncIterator[KubernetesLeases]:
    """A client of the API server of this pod; `timeout_ms` is for each request.

    Raises `InvalidSetting` outside of a pod.
    """
    server = _server(environment)
    credentials = Credentials(Path(credentials_path))
    if not place.namespace:
        place = KubernetesPlace(credentials.namespace(), place.name)
    timeout = ClientTimeout(total=timeout_ms / 1_000)
    async with ClientSession(timeout=timeout) as session:
        yield KubernetesLeases(session, credentials, server, place)


def _server(environment: Mapping[str, str]) -> str:
    host, port = (environment.get(name, "") for name in (HOST_VARIABLE, PORT_VARIABLE))
    if not host or not port:
        missing = PORT_VARIABLE if host else HOST_VARIABLE
        raise InvalidSetting(
            f"--elect kubernetes:// works in a pod of Kubernetes, and this process seems to run "
            f"in none: {missing} is not in the environment"
        )
    if not port.isascii() or not port.isdecimal():
        raise InvalidSetting(f"--elect kubernetes://: {PORT_VARIABLE} is {port!r}, not a number")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(error: Exception) -> str:
    match error:
        case ClientConnectorCertificateError():
            return str(error.certificate_error)
        case ClientConnectorError():
            return str(error.os_error)
        case _:
            return str(error) or "no answer in time"


def _lease(document: Document) -> KubernetesLease:
    if document.get("kind") != "Lease":
        raise KubernetesSilent(f"the API server has answered with a {document.get('kind')}")
    return KubernetesLease(document)


def _document(data: bytes) -> Document:
    """The JSON of an answer; for anything else a document that has the text as its message."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    return {"message": data[:200].decode(errors="replace").strip()}


def _message(document: Document) -> str:
    return str(document.get("message") or document.get("reason") or "without a reason")


def _retry_after_ms(text: str) -> float:
    return int(text) * 1_000.0 if text.isascii() and text.isdecimal() else 0.0


# --- kubernetes


REPLACE_ATTEMPTS = 3  # a request that was cut off may have changed the Lease, or somebody's label
RELEASED_S = 1  # the least that a Lease may say

_IDENTITY = re.compile(rf"(.*)_[0-9a-f]{{{2 * NONCE_BYTES}}}")

_log = structlog.get_logger(__name__)


class KubernetesElector:
    """One process that campaigns in Kubernetes."""

    def __init__(
        self, leases: KubernetesLeases, runtime: Runtime, *, holder: str, ttl_ms: int, told: Told
    ) -> None:
        """`holder` is the HOST:PORT that others are told; `told` hears of theirs."""
        self._leases = leases
        self._clock = runtime.clock
        self._random = runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._told = told
        self._seen: Sighting | None = None
        self._spec: Document = {}  # of the Lease that was seen
        self._changes = 0  # of it that were seen
        self._problem = ""

    async def campaign(self) -> Tenure:
        """Implement `Elector.campaign`."""
        identity = f"{self._holder}_{self._random.randbytes(NONCE_BYTES).hex()}"
        while True:
            least_ms = 0.0
            try:
                tenure = await self._attempt(identity)
            except KubernetesSilent as error:
                least_ms = min(error.wait_ms, self._ttl_ms)
                if str(error) != self._problem:
                    _log.warning("election goes on without an answer", problem=str(error))
                self._problem = str(error)
            else:
                self._problem = ""
                if tenure is not None:
                    return tenure
            now_ms, chance = self._clock.monotonic_ms(), self._random.random()
            wait_ms = look_wait_ms(self._seen, self._ttl_ms, chance, now_ms)
            await self._clock.sleep_ms(max(wait_ms, least_ms))

    async def _attempt(self, identity: str) -> Tenure | None:
        found = await self._leases.get()
        if found is None:
            self._seen = None
            self._told("")
            sent_ms = self._clock.monotonic_ms()
            taken = await self._leases.create(self._claim(identity, transitions=0))
        else:
            seen = self._sight(found)
            is_ours = found.holder == identity  # by a request whose answer was lost
            if not is_ours and not seen.is_over(self._clock.monotonic_ms()):
                return None
            transitions = found.transitions + (not is_ours)
            sent_ms = self._clock.monotonic_ms()
            changed = found.changed(**self._claim(identity, transitions=transitions))
            taken = await self._leases.replace(changed)
        if taken is None:  # somebody was faster
            return None
        self._seen = None
        self._told(self._holder)
        _log.info("elected", lease=identity, holder=self._holder)
        held = HeldKubernetesLease(self._leases, self._clock, taken, self._ttl_ms)
        return Tenure(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)

    def _claim(self, identity: str, *, transitions: int) -> dict[str, Any]:
        now = _now(self._clock)
        return {
            "holderIdentity": identity,
            "leaseDurationSeconds": math.ceil(self._ttl_ms / 1_000),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _sight(self, found: KubernetesLease) -> Sighting:
        """State of this Lease; its age counts from the last change of its `spec`."""
        if self._seen is None or found.spec != self._spec:
            self._spec = found.spec
            self._changes += 1
        holder = _address_in(found.holder)
        ttl_ms = found.ttl_ms or self._ttl_ms
        lease = ElectionLease(holder, b"", ttl_ms, is_released=not found.holder)
        self._seen = sight(self._seen, self._changes, lease, self._clock.monotonic_ms())
        self._told(holder)
        return self._seen


class HeldKubernetesLease:
    """A `RenewableLease` in Kubernetes."""

    def __init__(
        self, leases: KubernetesLeases, clock: Clock, held: KubernetesLease, ttl_ms: int
    ) -> None:
        """`held` is the Lease as this process has written it."""
        self._leases = leases
        self._clock = clock
        self._held = held
        self._identity = held.holder
        self._ttl_ms = ttl_ms

    async def renew(self) -> str | None:
        """Implement `RenewableLease.renew`."""
        while True:
            least_ms = 0.0
            try:
                return await self._replace(renewTime=_now(self._clock))
            except InvalidSetting as error:
                return str(error)
            except KubernetesSilent as error:
                least_ms = min(error.wait_ms, self._ttl_ms / RENEWALS)
                _log.warning("lease not renewed yet", problem=str(error))
            await self._clock.sleep_ms(max(poll_wait_ms(self._ttl_ms, 1.0), least_ms))

    async def release(self) -> None:
        """Implement `RenewableLease.release`."""
        now = _now(self._clock)
        with suppress(KubernetesSilent, InvalidSetting):  # then it lapses
            why = await self._replace(
                holderIdentity="",
                leaseDurationSeconds=RELEASED_S,
                acquireTime=now,
                renewTime=now,
            )
            if why is None:
                _log.info("lease released", lease=self._identity)

    async def _replace(self, **fields: Any) -> str | None:
        """Change the Lease as long as it is ours; why not, when it is not."""
        for _ in range(REPLACE_ATTEMPTS):
            replaced = await self._leases.replace(self._held.changed(**fields))
            if replaced is not None:
                self._held = replaced
                return None
            found = await self._leases.get()
            if found is None:
                return "somebody has deleted the lease"
            if not found.holder:
                return "somebody has released the lease"
            if found.holder != self._identity:
                return f"{_address_in(found.holder)} has taken the lease"
            self._held = found
        raise KubernetesSilent("somebody else changes the lease all the time")


def _address_in(identity: str) -> str:
    """The HOST:PORT in an identity of ours; that of another program is shown as it is."""
    found = _IDENTITY.fullmatch(identity)
    return identity if found is None else found[1]


def _now(clock: Clock) -> str:
    """The time of this machine, or of its clock that knows no day, as a Lease has it."""
    wall_ms = clock.wall_ms()
    now_ms = clock.monotonic_ms() if wall_ms is None else wall_ms
    return f"{datetime.fromtimestamp(now_ms / 1_000, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
