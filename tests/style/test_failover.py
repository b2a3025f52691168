"""The manifest of server/docs/failover.md starts servers that work, with what they need."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from shalekv.cli.commands.serve import serve
from shalekv.cli.process.lifecycle import serving_settings
from shalekv.cli.process.supervisor import GRACE_MS
from shalekv.server.election.elector import KubernetesPlace, parse_place
from shalekv.server.election.kubernetes import API_VERSION, METHODS
from shalekv.settings import WriterConfig
from tests.style.sources import ROOT

PAGE = (ROOT / "server" / "docs" / "failover.md").read_text(encoding="utf-8")
NAMESPACE, ACCOUNT, POD = "databases", "shalekv", "shalekv-0"


def manifest() -> dict[tuple[str, str], Any]:
    """Its objects, by kind and name."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def pod_spec() -> Any:
    return manifest()["StatefulSet", "shalekv"]["spec"]["template"]["spec"]


def settings_of(container: Any) -> WriterConfig:
    """Return the settings that `shalekv serve` makes of the arguments of the container."""
    command, *arguments = (each.replace("$(POD_NAME)", POD) for each in container["args"])
    assert command == serve.name
    context = serve.make_context("serve", arguments)
    values = {each["name"]: each.get("value") for each in container["env"]}
    url = {"url": values["SHALEKV_DATABASE__URL"]}
    return serving_settings({**context.params, **url}, None, WriterConfig)


def test_the_role_allows_what_the_elector_does_and_no_more() -> None:
    """The verbs and the resource are those of its requests, and the pods have the role."""
    objects = manifest()
    group, _, _ = API_VERSION.partition("/")
    rule = {"apiGroups": [group], "resources": ["leases"], "verbs": list(METHODS)}
    assert objects["Role", ACCOUNT]["rules"] == [rule]
    binding = objects["RoleBinding", ACCOUNT]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", ACCOUNT)
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    assert binding["subjects"] == [subject]
    assert ("ServiceAccount", ACCOUNT) in objects
    assert pod_spec()["serviceAccountName"] == ACCOUNT
    assert {each["metadata"]["namespace"] for each in objects.values()} == {NAMESPACE}


def test_the_servers_of_the_manifest_have_valid_settings() -> None:
    """Each flag is one of `serve`, the Lease is in the namespace of the Role, and a pod is reached
    under the name that it advertises.
    """
    settings = settings_of(pod_spec()["containers"][0])
    place = parse_place(settings.election.elect)
    assert place == KubernetesPlace(NAMESPACE, "shalekv")
    service = manifest()["StatefulSet", "shalekv"]["spec"]["serviceName"]
    headless = manifest()["Service", service]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert settings.server.advertise == f"{POD}.{service}:{headless['ports'][0]['port']}"


def test_kubernetes_lets_the_servers_stand_by() -> None:
    """No standby is killed for waiting, none before it has ended, and no variable that Kubernetes
    adds counts as a setting.
    """
    spec, (container,) = pod_spec(), pod_spec()["containers"]
    settings = settings_of(container)
    port = int(settings.server.listen.rpartition(":")[2])
    assert container["livenessProbe"]["tcpSocket"]["port"] == port
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": "shalekv.write"}
    grace_ms = spec["terminationGracePeriodSeconds"] * 1_000
    children_ms = 2 * GRACE_MS
    lease_ms = settings.election.lease_ttl_ms
    assert grace_ms > settings.server.shutdown_grace_ms + lease_ms + children_ms
    assert spec["enableServiceLinks"] is False
    stateful = manifest()["StatefulSet", "shalekv"]["spec"]
    assert stateful["updateStrategy"]["type"] == "OnDelete"
    assert stateful["podManagementPolicy"] == "Parallel"
