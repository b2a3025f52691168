"""Election in Kubernetes: one Lease, which is renewed by replacing it.

A Lease says who holds it and how long it lasts without being renewed. A holder replaces it in order
to renew it. A candidate replaces it when it has seen it unchanged for as long as it lasts, by its
own clock. Both name the version that they have read, and the API server refuses the slower one. The
times in a Lease are there for people and other programs. They are never compared with a clock here:
the clocks of two machines differ.

Other programs that elect with Leases do the same, so a Lease that one of them holds is respected.

Requests to the API server use the credentials of the pod. Kubernetes replaces its token and
certificates while it runs, so both are read for each request. A reply of the API server becomes one
of three outcomes:

    a Lease, or None       done, or not done because the Lease has changed
    KubernetesUnavailable  the outcome is unknown, or a retry may succeed
    InvalidSetting         permanent: no such namespace, no permission
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
    ObservedLease,
    next_poll_wait_ms,
    observe,
    poll_wait_ms,
)
from shalekv.runtime import Runtime
from shalekv.server.election.elector import (
    HolderChanged,
    KubernetesPlace,
    LeasedTerm,
    check_namespace,
)

API_VERSION = "coordination.k8s.io/v1"
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
TOKEN_FILE, CA_FILE, NAMESPACE_FILE = "token", "ca.crt", "namespace"
# The verbs of a Role, and the HTTP method of each.
GET, CREATE, UPDATE = "get", "create", "update"
METHODS: Mapping[str, str] = {GET: "GET", CREATE: "POST", UPDATE: "PUT"}

# Statuses of requests that were allowed, successful or not.
_ALLOWED = frozenset({200, 201, 404, 409})
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_REFUSED = range(400, 500)

REPLACE_ATTEMPTS = 3  # a lost reply, or a label of another program, may have changed the Lease
RELEASED_S = 1  # the shortest duration that a Lease may have
_IDENTITY = re.compile(rf"(.*)_[0-9a-f]{{{2 * NONCE_BYTES}}}")

Document = Mapping[str, Any]

_log = structlog.get_logger(__name__)


class KubernetesUnavailable(Exception):
    """The API server has not answered in time, or not as it should."""

    def __init__(self, problem: str, *, wait_ms: float = 0.0) -> None:
        """`wait_ms` is the time that the API server asks to wait before the next request."""
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
        """Time that it lasts without being renewed, if it says so."""
        seconds = self.spec.get("leaseDurationSeconds")
        return seconds * 1_000 if isinstance(seconds, int) and seconds > 0 else None

    @property
    def transitions(self) -> int:
        """Count of changes of its holder."""
        count = self.spec.get("leaseTransitions")
        return count if isinstance(count, int) else 0

    def changed(self, **fields: Any) -> Document:
        """Return the Lease with other fields in its `spec`; fields of other programs stay."""
        return {**self.document, "spec": {**self.spec, **fields}}


class ServiceAccount:
    """Token and certificates of a service account."""

    def __init__(self, folder: Path) -> None:
        """`folder` has the files, which Kubernetes keeps up to date. Raises `InvalidSetting`."""
        self._folder = folder
        self._ca = ""
        self._context: ssl.SSLContext | None = None
        try:
            self.read()
        except KubernetesUnavailable as error:
            raise InvalidSetting(
                f"--elect kubernetes:// needs the credentials of a service account: {error}. Has "
                "the pod a service account, and automountServiceAccountToken not set to false?"
            ) from error

    def read(self) -> tuple[str, ssl.SSLContext]:
        """Read the token, and the context that verifies the API server.

        Raises `KubernetesUnavailable`.
        """
        token, ca = self._text_of(TOKEN_FILE), self._text_of(CA_FILE)
        if self._context is None or ca != self._ca:
            try:
                context = ssl.create_default_context(cadata=ca)
            except (ssl.SSLError, ValueError) as error:
                problem = f"{self._folder / CA_FILE} holds no certificate: {error}"
                raise KubernetesUnavailable(problem) from error
            # Certificates of clusters may lack key identifiers, which newer Pythons require.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            self._ca, self._context = ca, context
        return token, self._context

    def namespace(self) -> str:
        """Read the namespace of the pod. Raises `InvalidSetting`."""
        try:
            return check_namespace(self._text_of(NAMESPACE_FILE))
        except KubernetesUnavailable as error:
            raise InvalidSetting(f"--elect kubernetes:///NAME: {error}; name one") from error

    def _text_of(self, name: str) -> str:
        """Read a file; it is short and in memory, so this does not block.

        Raises `KubernetesUnavailable`.
        """
        path = self._folder / name
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise KubernetesUnavailable(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise KubernetesUnavailable(f"{path} is not text") from error
        if not text:
            raise KubernetesUnavailable(f"{path} is empty")
        return text


class KubernetesLeases:
    """One Lease at the API server: read, created, and replaced if it has not changed."""

    def __init__(
        self,
        session: ClientSession,
        account: ServiceAccount,
        server: str,
        place: KubernetesPlace,
    ) -> None:
        """`server` is HOST:PORT of the API server; `place` names the namespace."""
        self._session = session
        self._account = account
        self._server = server
        self._place = place
        self._granted: set[str] = set()  # verbs that were allowed once

    async def get(self) -> KubernetesLease | None:
        """Read the Lease; None: there is none."""
        status, document = await self._request(GET)
        return None if status == HTTPStatus.NOT_FOUND else _lease(document)

    async def create(self, spec: Document) -> KubernetesLease | None:
        """Create the Lease; None: there is one already."""
        metadata = {"name": self._place.name, "namespace": self._place.namespace}
        body = {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}
        status, document = await self._request(CREATE, body)
        if status == HTTPStatus.NOT_FOUND:
            namespace = self._place.namespace
            raise InvalidSetting(
                f"--elect: no Lease can be created in the namespace {namespace} of Kubernetes, "
                f"which may not exist: {_message(document)}"
            )
        return None if status == HTTPStatus.CONFLICT else _lease(document)

    async def replace(self, changed: Document) -> KubernetesLease | None:
        """Replace the Lease from which `changed` was made; None: it has changed since."""
        status, document = await self._request(UPDATE, changed)
        is_another = status in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}
        return None if is_another else _lease(document)

    async def _request(self, verb: str, body: Document | None = None) -> tuple[int, Document]:
        """Send a request; returns status and document of a reply with a status of `_ALLOWED`."""
        status, document, wait_ms = await self._send(verb, body)
        said = f"{self._server} has answered {status}: {_message(document)}"
        if status in _ALLOWED and document.get("kind") in {"Lease", "Status"}:
            self._granted.add(verb)
            return status, document
        match status:
            case HTTPStatus.UNAUTHORIZED:
                may_pass = bool(self._granted)  # it has accepted a token before
            case HTTPStatus.FORBIDDEN:
                may_pass = verb in self._granted
            case _:
                may_pass = status in _LATER | _ALLOWED or status not in _REFUSED
        if may_pass:
            raise KubernetesUnavailable(said, wait_ms=wait_ms)
        raise InvalidSetting(self._refusal(verb, status, said))

    async def _send(self, verb: str, body: Document | None) -> tuple[int, Document, float]:
        token, context = self._account.read()
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
            raise KubernetesUnavailable(f"{self._server} does not answer: {_why(error)}") from error

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
    """Open a client of the API server of this pod, with a timeout for each request.

    Raises `InvalidSetting` outside of a pod.
    """
    server = _server(environment)
    account = ServiceAccount(Path(credentials_path))
    if not place.namespace:
        place = KubernetesPlace(account.namespace(), place.name)
    timeout = ClientTimeout(total=timeout_ms / 1_000)
    async with ClientSession(timeout=timeout) as session:
        yield KubernetesLeases(session, account, server, place)


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
        raise KubernetesUnavailable(f"the API server has answered with a {document.get('kind')}")
    return KubernetesLease(document)


def _document(data: bytes) -> Document:
    """Parse the JSON of a reply; for anything else return a document with the text as message."""
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


class KubernetesElector:
    """One process that campaigns in Kubernetes."""

    def __init__(
        self,
        leases: KubernetesLeases,
        runtime: Runtime,
        *,
        holder: str,
        ttl_ms: int,
        on_holder_change: HolderChanged,
    ) -> None:
        """`holder` is the HOST:PORT that others see; `on_holder_change` is called with theirs."""
        self._leases = leases
        self._clock = runtime.clock
        self._random = runtime.random
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._on_holder_change = on_holder_change
        self._seen: ObservedLease | None = None
        self._spec: Document = {}  # of the Lease when it was last read
        self._changes = 0  # count of its changes that were seen
        self._problem = ""

    async def campaign(self) -> LeasedTerm:
        """Implement `Elector.campaign`."""
        identity = f"{self._holder}_{self._random.randbytes(NONCE_BYTES).hex()}"
        while True:
            least_ms = 0.0
            try:
                term = await self._attempt(identity)
            except KubernetesUnavailable as error:
                least_ms = min(error.wait_ms, self._ttl_ms)
                if str(error) != self._problem:
                    _log.warning("election goes on without an answer", problem=str(error))
                self._problem = str(error)
            else:
                self._problem = ""
                if term is not None:
                    return term
            now_ms, chance = self._clock.monotonic_ms(), self._random.random()
            wait_ms = next_poll_wait_ms(self._seen, self._ttl_ms, chance, now_ms)
            await self._clock.sleep_ms(max(wait_ms, least_ms))

    async def _attempt(self, identity: str) -> LeasedTerm | None:
        found = await self._leases.get()
        if found is None:
            self._seen = None
            self._on_holder_change("")
            sent_ms = self._clock.monotonic_ms()
            taken = await self._leases.create(self._claim(identity, transitions=0))
        else:
            seen = self._observe(found)
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
        self._on_holder_change(self._holder)
        _log.info("elected", lease=identity, holder=self._holder)
        held = HeldKubernetesLease(self._leases, self._clock, taken, self._ttl_ms)
        return LeasedTerm(held, self._clock, ttl_ms=self._ttl_ms, acquired_ms=sent_ms)

    def _claim(self, identity: str, *, transitions: int) -> dict[str, Any]:
        now = _now(self._clock)
        return {
            "holderIdentity": identity,
            "leaseDurationSeconds": math.ceil(self._ttl_ms / 1_000),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _observe(self, found: KubernetesLease) -> ObservedLease:
        """Update the state of the Lease; its age counts from the last change of its `spec`."""
        if self._seen is None or found.spec != self._spec:
            self._spec = found.spec
            self._changes += 1
        holder = _address_in(found.holder)
        ttl_ms = found.ttl_ms or self._ttl_ms
        lease = ElectionLease(holder, b"", ttl_ms, is_released=not found.holder)
        self._seen = observe(self._seen, self._changes, lease, self._clock.monotonic_ms())
        self._on_holder_change(holder)
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
            except KubernetesUnavailable as error:
                least_ms = min(error.wait_ms, self._ttl_ms / RENEWALS)
                _log.warning("lease not renewed yet", problem=str(error))
            await self._clock.sleep_ms(max(poll_wait_ms(self._ttl_ms, 1.0), least_ms))

    async def release(self) -> None:
        """Implement `RenewableLease.release`."""
        now = _now(self._clock)
        with suppress(KubernetesUnavailable, InvalidSetting):  # then the Lease expires
            why = await self._replace(
                holderIdentity="",
                leaseDurationSeconds=RELEASED_S,
                acquireTime=now,
                renewTime=now,
            )
            if why is None:
                _log.info("lease released", lease=self._identity)

    async def _replace(self, **fields: Any) -> str | None:
        """Change the Lease if it is still ours; returns None, or the reason why it is not."""
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
        raise KubernetesUnavailable("somebody else changes the lease all the time")


def _address_in(identity: str) -> str:
    """Return the HOST:PORT in an identity; the identity itself if it is of another program."""
    found = _IDENTITY.fullmatch(identity)
    return identity if found is None else found[1]


def _now(clock: Clock) -> str:
    """Format the time of this machine as in a Lease; without a wall clock, the monotonic time."""
    wall_ms = clock.wall_ms()
    now_ms = clock.monotonic_ms() if wall_ms is None else wall_ms
    return f"{datetime.fromtimestamp(now_ms / 1_000, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
