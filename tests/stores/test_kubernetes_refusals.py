"""Credentials, permissions and API servers that refuse an elector of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shalekv.errors import InvalidSetting
from tests.kit.steady_loop import loop_s
from tests.kit.timeouts import until
from tests.servers.kubernetes import NAMESPACE, KubernetesApi, kubernetes_api
from tests.stores.elections import LEASE, Election, in_kubernetes
from tests.stores.kubernetes_terms import (
    SHORT_MS,
    TTL_MS,
    elector,
    holder_of,
    kept,
    renewals,
    requests,
)

# Credentials.


async def test_credentials_are_read_again(kubernetes: KubernetesApi) -> None:
    """A token and certificates that Kubernetes has replaced are used at once, by a holder and by a
    standby.
    """
    async with (
        elector(kubernetes, ttl_ms=TTL_MS) as first,
        elector(kubernetes, "b:2", ttl_ms=TTL_MS) as second,
    ):
        term = await first.campaign()
        async with asyncio.TaskGroup() as tasks:
            campaign = tasks.create_task(second.campaign())
            async with kept(term) as keeping:
                for rotate in (kubernetes.rotate_token, kubernetes.rotate_ca):
                    rotate()
                    await renewals(kubernetes, 1)
                assert not keeping.done()
            await term.resign()
            await campaign
        assert holder_of(kubernetes).startswith("b:2_")


async def test_a_token_that_expires_is_waited_out(kubernetes: KubernetesApi) -> None:
    """Once a token was accepted, a refusal may be over when the file has the next one."""
    async with elector(kubernetes, ttl_ms=TTL_MS) as made, kept(await made.campaign()) as keeping:
        accepted, kubernetes.tokens = kubernetes.tokens, set()
        refused = requests(kubernetes, "PUT")
        await until(lambda: requests(kubernetes, "PUT") > refused, "a renewal that is refused")
        kubernetes.tokens = accepted
        await renewals(kubernetes, 1)
        assert not keeping.done()


async def test_a_token_that_was_never_accepted_is_an_error(kubernetes: KubernetesApi) -> None:
    """A process with such a token ends, since waiting would not help."""
    kubernetes.tokens = set()
    async with elector(kubernetes) as made:
        with pytest.raises(InvalidSetting, match=r"does not accept the token of this pod: .* 401"):
            await made.campaign()


async def test_no_token_goes_to_a_stranger(kubernetes: KubernetesApi) -> None:
    """An API server whose certificate is not of the pod's authority sees no request; the trouble is
    logged, and gone when the right certificates are there.
    """
    ca = Path(kubernetes.credentials) / "ca.crt"
    right = ca.read_text()
    async with kubernetes_api(Path(kubernetes.credentials) / "stranger") as other:
        ca.write_text((Path(other.credentials) / "ca.crt").read_text())
        with capture_logs() as logs:
            async with elector(kubernetes, ttl_ms=SHORT_MS) as made, asyncio.TaskGroup() as tasks:
                campaign = tasks.create_task(made.campaign())
                await until(lambda: logs, "a log line")
                assert "CERTIFICATE_VERIFY_FAILED" in logs[0]["problem"]
                assert kubernetes.seen == []
                ca.write_text(right)
                await campaign


# Refusals.


@pytest.mark.parametrize("verb", ["get", "create", "update"])
async def test_a_missing_permission_is_named(kubernetes: KubernetesApi, verb: str) -> None:
    """The error names the missing permission of the Role, and the process ends."""
    kubernetes.verbs.remove(verb)
    if verb == "update":
        kubernetes.put(LEASE, {})
    async with elector(kubernetes) as made:
        with pytest.raises(InvalidSetting) as refused:
            await made.campaign()
    assert f"forbids to {verb} leases.coordination.k8s.io" in str(refused.value)
    assert f"in the namespace {NAMESPACE}. A Role" in str(refused.value)
    assert "must allow get, create, update of leases" in str(refused.value)
    assert f'User "{kubernetes.user}" cannot {verb} resource' in str(refused.value)


async def test_a_holder_that_may_not_renew_says_so(kubernetes: KubernetesApi) -> None:
    """A Role without `update` ends the first term, by its name."""
    kubernetes.verbs.remove("update")
    async with elector(kubernetes, ttl_ms=SHORT_MS) as made:
        assert "forbids to update leases" in await (await made.campaign()).keep()


async def test_a_permission_that_was_there_is_waited_for(kubernetes: KubernetesApi) -> None:
    """A refusal of what was allowed before passes, such as while an API server starts."""
    kubernetes.put(LEASE, {})
    async with elector(kubernetes, ttl_ms=TTL_MS) as made, kept(await made.campaign()) as keeping:
        kubernetes.verbs.clear()
        refused = requests(kubernetes, "PUT")
        await until(lambda: requests(kubernetes, "PUT") > refused, "a renewal that is refused")
        kubernetes.verbs.update(("get", "update"))
        await renewals(kubernetes, 1)
        assert not keeping.done()


async def test_a_namespace_that_is_not_there_is_named(kubernetes: KubernetesApi) -> None:
    """The error names the namespace, whatever the Role allows."""
    kubernetes.namespaces.clear()
    async with elector(kubernetes) as made:
        with pytest.raises(InvalidSetting, match=f"in the namespace {NAMESPACE} .* not exist: "):
            await made.campaign()


async def test_an_overloaded_api_server_is_left_alone(kubernetes: KubernetesApi) -> None:
    """For as long as it asks for, if that is not longer than the lease lasts. What is wrong is
    logged when it changes.
    """
    kubernetes.trouble(status=429, retry_after_s=1, times=1)
    kubernetes.trouble(status=503, times=2)
    began_s = loop_s()
    with capture_logs() as logs:
        async with elector(kubernetes, ttl_ms=TTL_MS) as made:
            await made.campaign()
    assert loop_s() - began_s >= 1.0
    problems = [line["problem"] for line in logs if "problem" in line]
    said = f"127.0.0.1:{kubernetes.port} has answered"
    assert problems == [f"{said} 429: Too Many Requests", f"{said} 503: Service Unavailable"]


# Where there is no pod.


def broken_pods(kubernetes: KubernetesApi) -> Iterator[tuple[Election, str]]:
    """Yield environments that are no pod, or a broken one, and the errors of an elector there."""
    election, folder = in_kubernetes(kubernetes), Path(kubernetes.credentials)
    host, port = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
    yield replace(election, environment={}), f"none: {host} is not in the environment"
    yield replace(election, environment={host: "::1"}), f"{port} is not in the environment"
    environment = {**kubernetes.environment, port: "https"}
    yield replace(election, environment=environment), f"{port} is 'https', not a number"
    yield replace(election, credentials=str(folder / "none")), "token: No such file or directory"
    (folder / "token").unlink()
    (folder / "token").write_text("\n")
    yield election, "token is empty. Has the pod a service account"
    (folder / "token").write_bytes(b"\xff")
    yield election, "token is not text"
    (folder / "token").write_text("a token")
    (folder / "ca.crt").unlink()
    (folder / "ca.crt").write_text("no certificate")
    yield election, "ca.crt holds no certificate"
    kubernetes.rotate_ca()
    (folder / "ca.crt").unlink()
    (folder / "ca.crt").symlink_to("..data/ca.crt")
    (folder / "namespace").unlink()
    yield replace(election, elect="kubernetes:///name"), "namespace: No such file or .*; name one"


async def test_a_process_outside_a_pod_gets_an_error_that_says_so(
    kubernetes: KubernetesApi,
) -> None:
    """At once, with what is missing."""
    for election, problem in broken_pods(kubernetes):
        with pytest.raises(InvalidSetting, match=f"^--elect kubernetes://.*{problem}"):
            async with election.electors("a:1"):
                pass
