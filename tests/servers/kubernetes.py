"""The API server of Kubernetes, as far as Leases need it, and the files of a pod.

    async with kubernetes_api(tmp_path) as api:
        ... api.environment and api.credentials are what a pod finds ...
        api.trouble(status=429, retry_after_s=1, times=2, when="^PUT ")
        api.rotate_token()

It speaks TLS, authenticates by a bearer token, and authorizes by a Role. Versions, conflicts,
validation and the text of errors are those of Kubernetes. It runs in the event loop of the test.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import trustme
from aiohttp import web

HOST = "127.0.0.1"
NAMESPACE = "databases"
GROUP = "coordination.k8s.io"
COLLECTION = f"/apis/{GROUP}/v1/namespaces/{{namespace}}/leases"
RESOURCE = f"leases.{GROUP}"
VERBS: Mapping[str, str] = {"GET": "get", "POST": "create", "PUT": "update"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
TEXTS = ("holderIdentity", "strategy", "preferredHolder")
TIMES = ("acquireTime", "renewTime")
NUMBERS: Mapping[str, tuple[int, str]] = {
    "leaseDurationSeconds": (1, "must be greater than 0"),
    "leaseTransitions": (0, "must be greater than or equal to 0"),
}

Lease = dict[str, Any]


class Refused(Exception):
    """An error reply instead of a Lease."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    def answer(self, retry_after_s: int = 0) -> web.Response:
        document = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.status,
        }
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
        return web.json_response(document, status=self.status, headers=headers)


@dataclass(slots=True, eq=False)
class Trouble:
    """Fault of requests whose "METHOD path" matches, and how many of them are left."""

    when: re.Pattern[str]
    times: int | None  # None: until healed
    status: int = 0
    retry_after_s: int = 0
    delay_s: float = 0.0
    loses_reply: bool = False
    spent: int = 0

    def take(self, request: str) -> bool:
        if not self.when.search(request) or self.spent == self.times:
            return False
        self.spent += 1
        return True


@dataclass(slots=True)
class KubernetesApi:
    """One API server, and the service account of the pods of a test."""

    folder: Path
    port: int = 0
    namespaces: set[str] = field(default_factory=lambda: {NAMESPACE, "default"})
    user: str = f"system:serviceaccount:{NAMESPACE}:shalekv"
    verbs: set[str] = field(default_factory=lambda: set(VERBS.values()))  # of the Role
    tokens: set[str] = field(default_factory=set)  # accepted ones
    leases: dict[tuple[str, str], Lease] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)  # "METHOD path", in the order of arrival
    troubles: list[Trouble] = field(default_factory=list)
    _healed: asyncio.Event = field(default_factory=asyncio.Event)
    _context: ssl.SSLContext = field(
        default_factory=lambda: ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    )
    _ca_pem: str = ""
    _token: str = ""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _transports: set[asyncio.Transport] = field(default_factory=set)

    # Files and environment of a pod.

    @property
    def environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(self.port)}

    @property
    def credentials(self) -> str:
        return str(self.folder / "serviceaccount")

    def rotate_token(self) -> None:
        """Another token is in the files; from now on the one before is not accepted."""
        self._token = f"token-{next(self._numbers)}"
        self.tokens = {self._token}
        self._publish()

    def rotate_ca(self) -> None:
        """Another authority has signed the certificate; open connections end."""
        ca = trustme.CA()
        ca.issue_cert(HOST).configure_cert(self._context)
        self._ca_pem = ca.cert_pem.bytes().decode()
        self._publish()
        self.hang_up()

    def _publish(self) -> None:
        """All files change at once, by a link, as Kubernetes does it."""
        mounted = Path(self.credentials)
        data = mounted / f"..{next(self._numbers)}"
        data.mkdir(parents=True)
        texts = {"token": self._token, "ca.crt": self._ca_pem, "namespace": NAMESPACE}
        for name, text in texts.items():
            (data / name).write_text(text)
            with suppress(FileExistsError):
                (mounted / name).symlink_to(f"..data/{name}")
        (mounted / "..next").symlink_to(data.name)
        (mounted / "..next").rename(mounted / "..data")

    # Commands of kubectl.

    def lease(self, name: str, namespace: str = NAMESPACE) -> Lease:
        return deepcopy(self.leases[namespace, name])

    def put(self, name: str, spec: Lease, labels: Mapping[str, str] | None = None) -> None:
        """Write a Lease, over whatever was there."""
        before = self.leases.get((NAMESPACE, name))
        metadata = {"name": name, "namespace": NAMESPACE, "labels": dict(labels or {})}
        self._store(metadata, _checked_spec(name, spec), before)

    def delete(self, name: str) -> None:
        del self.leases[NAMESPACE, name]

    # Faults.

    def trouble(
        self,
        *,
        when: str = "",
        times: int | None = None,
        status: int = 0,
        retry_after_s: int = 0,
        delay_s: float = 0.0,
        loses_reply: bool = False,
    ) -> Trouble:
        """Requests are answered with `status`, later, or done without an answer."""
        made = Trouble(re.compile(when), times, status, retry_after_s, delay_s, loses_reply)
        self.troubles.append(made)
        return made

    def hang_up(self) -> None:
        """Every connection ends, without a word to a client that may not be there any more."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def heal(self) -> None:
        self.troubles.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    # The API.

    async def answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self._transports.add(request.transport)
        asked = f"{request.method} {request.path}"
        self.seen.append(asked)
        taken = [each for each in list(self.troubles) if each.take(asked)]
        for trouble in taken:
            if trouble.status:
                reason = HTTPStatus(trouble.status).phrase
                return Refused(trouble.status, reason, reason).answer(trouble.retry_after_s)
            if trouble.delay_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._healed.wait(), trouble.delay_s)
        try:
            answered = self._done(request, await request.read())
        except Refused as refused:
            answered = refused.answer()
        if any(trouble.loses_reply for trouble in taken) and request.transport is not None:
            request.transport.abort()
        return answered

    def _done(self, request: web.Request, body: bytes) -> web.Response:
        namespace = request.match_info.get("namespace")
        name = request.match_info.get("name", "")
        verb = VERBS.get(request.method)
        user = self._user(request.headers.get("Authorization", ""))
        if namespace is None:
            return web.Response(status=404, text="404 page not found\n")
        if verb is None or (verb == "create") == bool(name):
            message = "the server does not allow this method on the requested resource"
            raise Refused(405, "MethodNotAllowed", message)
        self._allow(user, verb, namespace, name)
        if verb == "get":
            return web.json_response(self._found(namespace, name))
        lease = _checked(body, namespace)
        if verb == "create":
            return web.json_response(self._create(lease, namespace), status=201)
        return web.json_response(self._update(lease, namespace, name))

    def _user(self, authorization: str) -> str:
        if not authorization:
            return "system:anonymous"
        if authorization.removeprefix("Bearer ") not in self.tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")
        return self.user

    def _allow(self, user: str, verb: str, namespace: str, name: str) -> None:
        if user != self.user or verb not in self.verbs:
            what = f'{RESOURCE} "{name}"' if name else RESOURCE
            message = (
                f'{what} is forbidden: User "{user}" cannot {verb} resource "leases" in API group '
                f'"{GROUP}" in the namespace "{namespace}"'
            )
            raise Refused(403, "Forbidden", message)

    def _found(self, namespace: str, name: str) -> Lease:
        found = self.leases.get((namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{RESOURCE} "{name}" not found')
        return found

    def _create(self, lease: Lease, namespace: str) -> Lease:
        name = lease["metadata"].get("name", "")
        if NAME.fullmatch(name) is None:
            message = f'Lease.{GROUP} "{name}" is invalid: metadata.name: Invalid value: "{name}"'
            raise Refused(422, "Invalid", message)
        if namespace not in self.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if (namespace, name) in self.leases:
            raise Refused(409, "AlreadyExists", f'{RESOURCE} "{name}" already exists')
        return self._store({**lease["metadata"], "namespace": namespace}, lease["spec"], None)

    def _update(self, lease: Lease, namespace: str, name: str) -> Lease:
        metadata = lease["metadata"]
        if metadata.get("name") != name:
            message = "the name of the object does not match the name on the URL"
            raise Refused(400, "BadRequest", message)
        found = self.leases.get((namespace, name))
        known = found["metadata"] if found is not None else {"uid": ""}
        conflict = f'Operation cannot be fulfilled on {RESOURCE} "{name}": '
        if metadata.get("uid") not in {None, known["uid"]}:
            raise Refused(409, "Conflict", f"{conflict}Precondition failed: UID in precondition")
        if found is None:  # a request without a uid creates it
            return self._create(lease, namespace)
        if not metadata.get("resourceVersion"):
            message = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise Refused(422, "Invalid", f'Lease.{GROUP} "{name}" is invalid: {message}')
        if metadata["resourceVersion"] != known["resourceVersion"]:
            message = (
                "the object has been modified; please apply your changes to the latest version"
            )
            raise Refused(409, "Conflict", conflict + message)
        return self._store(metadata, lease["spec"], found)

    def _store(self, metadata: Lease, spec: Lease, before: Lease | None) -> Lease:
        kept = before["metadata"] if before is not None else {}
        fresh = {"uid": str(uuid4()), "creationTimestamp": f"{datetime.now(UTC):%FT%TZ}"}
        known = {name: kept.get(name, fresh[name]) for name in fresh}
        metadata = {**metadata, **known, "resourceVersion": kept.get("resourceVersion", "")}
        lease = {"apiVersion": f"{GROUP}/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        if lease != before:  # a change that changes nothing is none
            metadata["resourceVersion"] = str(next(self._numbers))
        self.leases[metadata["namespace"], metadata["name"]] = lease
        return lease


def _checked(body: bytes, namespace: str) -> Lease:
    """Return the Lease in a request, with the fields that Kubernetes sets."""
    try:
        lease = json.loads(body)
    except ValueError as error:
        raise Refused(400, "BadRequest", f"invalid character in the body: {error}") from error
    if (lease.get("apiVersion"), lease.get("kind")) != (f"{GROUP}/v1", "Lease"):
        raise Refused(400, "BadRequest", "the object provided is unrecognized")
    metadata = lease.get("metadata") or {}
    if metadata.get("namespace") not in {None, namespace}:
        message = "the namespace of the provided object does not match the namespace on the request"
        raise Refused(400, "BadRequest", message)
    spec = _checked_spec(metadata.get("name", ""), lease.get("spec") or {})
    return {"metadata": metadata, "spec": spec}


def _checked_spec(name: str, spec: Lease) -> Lease:
    """Drop unknown fields; validate the others like Kubernetes."""
    kept = {key: spec[key] for key in (*TEXTS, *TIMES, *NUMBERS) if spec.get(key) is not None}
    for key, value in kept.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        is_text = isinstance(value, str)
        is_good = is_number if key in NUMBERS else is_text
        if key in TIMES:
            is_good = is_text and TIME.fullmatch(value) is not None
        if not is_good:
            raise Refused(400, "BadRequest", f"Lease in version v1 cannot be handled: {key}")
        least, problem = NUMBERS.get(key, (0, ""))
        if is_number and value < least:
            message = f'Lease.{GROUP} "{name}" is invalid: spec.{key}: Invalid value: {value}: '
            raise Refused(422, "Invalid", message + problem)
    return kept


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[KubernetesApi]:
    """An API server without Leases, whose files for pods are below `folder`."""
    api = KubernetesApi(folder)
    api.rotate_ca()
    api.rotate_token()
    app = web.Application()
    for path in (COLLECTION, f"{COLLECTION}/{{name}}", "/{elsewhere:.*}"):
        app.router.add_route("*", path, api.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0, ssl_context=api._context).start()  # noqa: SLF001 - ours
        api.port = runner.addresses[0][1]
        yield api
    finally:
        api.heal()
        api.hang_up()
        await runner.cleanup()
