"""The files of docker/ agree with the product: settings, commands, files, users, versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from shalekv.cli.commands.tls import init
from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.settings_flags import settings_of
from shalekv.cli.console.variables import CLIENT_VARIABLES, variable_of_client
from shalekv.cli.main import shalekv
from shalekv.settings import (
    AnyConfig,
    CasChoice,
    ReaderConfig,
    SafekeeperConfig,
    ServerSettings,
    WriterConfig,
)
from shalekv.store.url import BucketUrl, parse_url
from tests.kit.compose_file import (
    COMPOSE,
    DOCKER,
    MINIO,
    OBSERVABILITY,
    PORT,
    SAFEKEEPER_PORT,
    TLS,
    Service,
    VariableMissing,
    read_compose,
    read_files,
    variables_of,
)
from tests.kit.dockerfile import Image, read_dockerfile
from tests.servers.obtain import MINIO as MINIO_PACKAGE
from tests.style.sources import ROOT

EXAMPLE = dict(
    line.split("=", 1)
    for line in (DOCKER / ".env.example").read_text().splitlines()
    if line and not line.startswith("#")
)
SERVICES = read_compose(EXAMPLE)
WITH_MINIO = read_compose(EXAMPLE, MINIO)
WITH_TLS = read_compose(EXAMPLE, TLS)
OBSERVED = read_compose(EXAMPLE, OBSERVABILITY)
ALL_FILES = pytest.mark.parametrize(
    "services",
    [SERVICES, WITH_MINIO, WITH_TLS, OBSERVED],
    ids=[COMPOSE, MINIO, TLS, OBSERVABILITY],
)
OF_OURS, OF_MINIO = read_dockerfile("Dockerfile"), read_dockerfile("minio.Dockerfile")
OURS = {name: service for name, service in SERVICES.items() if service.is_ours}
WRITERS = {name: service for name, service in OURS.items() if "serve" in service.argv}
READERS = {name: service for name, service in OURS.items() if "reader" in service.argv}
SERVERS = WRITERS | READERS
SAFEKEEPERS = {name: service for name, service in OURS.items() if "safekeeper" in service.argv}
OBSERVERS = set(OBSERVED) - set(SERVICES)
SCRIPTS = "/opt/shalekv/scripts/"
TLS_FOLDER = "/etc/shalekv"
OF_S3 = re.compile("AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY)")


def parsed(argv: list[str]) -> click.Context:
    name, *rest = argv
    # A command keeps the help option of its first context: it has to be that of the users.
    above = click.Context(shalekv, **shalekv.context_settings)
    command = shalekv.get_command(above, name)
    assert command is not None, name
    return command.make_context(name, rest, parent=above)


def test_hadolint_has_nothing_to_say() -> None:
    """The Dockerfiles keep the rules that Dockerfiles are held to."""
    hadolint = Path(sys.executable).with_name("hadolint")
    files = [DOCKER / "Dockerfile", DOCKER / "minio.Dockerfile"]
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", OURS)
def test_variables_are_settings(name: str) -> None:
    """Every variable of a container is a setting, or one of those that S3 clients read."""
    known = {setting.variable for setting in settings_of(AnyConfig)}
    known |= {CONFIG_VARIABLE} | CLIENT_VARIABLES
    given = OURS[name].text["environment"]
    assert [v for v in given if v not in known and not OF_S3.fullmatch(v)] == []
    assert {type(value) for value in given.values()} == {str}  # YAML has other ideas of true


@pytest.mark.parametrize("name", OURS)
def test_arguments_and_variables_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Click takes each command line, and the settings each value, as the process would."""
    for variable, value in OURS[name].environment.items():
        monkeypatch.setenv(variable, value)
    python, script, *command = OURS[name].argv
    assert python == "python"
    assert (DOCKER / script.removeprefix(SCRIPTS)).is_file()
    flags = parsed(command).params if command else {}
    known = {setting.name: flags.get(setting.name) for setting in settings_of(AnyConfig)}
    if name in READERS:
        settings: ReaderConfig | WriterConfig = load_settings(known, None, ReaderConfig)
    else:
        settings = load_settings(known, None, WriterConfig)
    assert isinstance(parse_url(settings.database.url), BucketUrl)
    is_two_phase = "two-phase" in OURS[name].profiles
    assert (settings.store.cas is CasChoice.TWO_PHASE) == is_two_phase
    assert bool(settings.store.records_url) == is_two_phase


@pytest.mark.parametrize("name", SERVERS)
def test_servers_are_reached(name: str) -> None:
    """Each listens where its port is published, on loopback alone."""
    server = SERVERS[name]
    assert parsed(server.argv[2:]).params["listen"] == f"0.0.0.0:{PORT}"
    (published,) = server.text["ports"]
    assert re.fullmatch(rf"127\.0\.0\.1:\d+:{PORT}", published)


@pytest.mark.parametrize("name", WRITERS)
def test_writers_leave_jobs_to_others_and_advertise_their_names(name: str) -> None:
    """Compactor and collector are containers of their own, and readers advertise the writer's
    address.
    """
    flags = parsed(WRITERS[name].argv[2:]).params
    assert (flags["with_compactor"], flags["with_collector"]) == (False, False)
    assert WRITERS[name].environment["SHALEKV_SERVER__ADVERTISE"] == f"{name}:{PORT}"


def test_there_are_readers() -> None:
    """Two of the first database, and one of that with safekeepers, of which there are three."""
    assert [name for name in READERS if not READERS[name].profiles] == ["reader-1", "reader-2"]
    assert [name for name in READERS if READERS[name].profiles] == ["reader-quorum"]
    assert len(SAFEKEEPERS) == 3


def test_nothing_else_is_published() -> None:
    """Processes on the machine reach writers and readers, and neither the S3 server nor MariaDB."""
    for services in (SERVICES, WITH_MINIO, WITH_TLS, OBSERVED):
        published = {name for name, service in services.items() if "ports" in service.text}
        added = OBSERVERS if services is OBSERVED else set()
        assert published == {*SERVERS, *added}
    ports = [port for service in OBSERVED.values() for port in service.text.get("ports", ())]
    assert len(set(ports)) == len(ports)
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_health_check_is_that_of_the_image() -> None:
    """Servers have the health check of the image; for containers without a port it is disabled."""
    (of_image,) = OF_OURS.arguments("HEALTHCHECK")
    _, _, command = of_image.partition("CMD ")
    for name, service in OURS.items():
        assert bool(service.health) == (name in SERVERS | SAFEKEEPERS), name
        assert service.health or service.text["healthcheck"] == {"disable": True}
    for writer in SERVERS.values():
        assert writer.health == json.loads(command)
        parsed(writer.health[1:])
    for safekeeper in SAFEKEEPERS.values():
        assert parsed(safekeeper.argv[2:]).params["listen"] == f"0.0.0.0:{SAFEKEEPER_PORT}"
        asked = parsed(safekeeper.health[1:]).params["addr"]
        assert asked == (f"127.0.0.1:{SAFEKEEPER_PORT}",)


@pytest.mark.parametrize("name", SERVERS | SAFEKEEPERS)
def test_servers_listen_with_tls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the file for TLS they differ in that alone, and none of them is insecure."""
    plain, service = OURS[name], WITH_TLS[name]
    assert service.argv == [word for word in plain.argv if word != "--insecure"]
    for variable, value in service.environment.items():
        monkeypatch.setenv(variable, value)
    flags = parsed(service.argv[2:]).params
    known = {setting.name: flags.get(setting.name) for setting in settings_of(AnyConfig)}
    assert service.health == plain.health
    variables = map(variable_of_client, ("tls_ca", "tls_cert", "tls_key"))
    asked = [service.environment.get(each, "") for each in variables]  # by its health check
    if name in SAFEKEEPERS:
        tls = load_settings(known, None, SafekeeperConfig).tls
        assert tls.tls_client_ca == f"{TLS_FOLDER}/ca.crt"
        assert asked == [tls.tls_client_ca, tls.tls_cert, tls.tls_key]
    else:
        model: type[ReaderConfig | WriterConfig] = ReaderConfig if name in READERS else WriterConfig
        settings = load_settings(known, None, model)
        tls = settings.tls
        assert (tls.tls_client_ca, tls.tls_server_ca) == ("", f"{TLS_FOLDER}/ca.crt")
        assert settings.access.tokens_file == f"{TLS_FOLDER}/tokens"
        assert settings.access.admin_names == {"token:admin"}
        assert asked == [tls.tls_server_ca, "", ""]
    assert (tls.tls_cert, tls.tls_key) == (f"{TLS_FOLDER}/server.crt", f"{TLS_FOLDER}/server.key")
    assert TLS_FOLDER in service.volumes
    assert service.depends_on["certificates"] == "service_completed_successfully"


def test_certificates_have_the_names_of_servers() -> None:
    """The certificate is for every service that listens; only its maker has the authority's key."""
    maker = WITH_TLS["certificates"]
    assert maker.argv[:3] == ["shalekv", "tls", "init"]
    settings = shalekv.context_settings  # see `parsed`
    made = init.make_context("init", maker.argv[3:], **settings).params
    assert set(made["hosts"]) == {*SERVERS, *SAFEKEEPERS}
    assert str(made["folder"]) == TLS_FOLDER
    authority = maker.volumes[str(made["authority_folder"])]
    assert [name for name, each in WITH_TLS.items() if authority in each.volumes.values()] == [
        maker.name
    ]


def test_prometheus_asks_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container tells its metrics where ops/prometheus.yaml looks; a job is a database."""
    config = yaml.safe_load((ROOT / "ops/prometheus.yaml").read_text())
    asked: dict[str, str] = {}
    for job in config["scrape_configs"]:
        for found in job.get("static_configs", ()):
            asked |= dict.fromkeys(found["targets"], job["job_name"])
        for found in job.get("dns_sd_configs", ()):
            asked |= {f"{name}:{found['port']}": job["job_name"] for name in found["names"]}
    telling = {}
    for name in set(OURS) - {"bucket"}:
        with monkeypatch.context() as patched:
            for variable, value in OBSERVED[name].environment.items():
                patched.setenv(variable, value)
            known = {setting.name: None for setting in settings_of(AnyConfig)}
            telemetry = load_settings(known, None, WriterConfig).telemetry
        port = telemetry.metrics.removeprefix("0.0.0.0:")
        job = "safekeepers" if name in SAFEKEEPERS else ([*OURS[name].profiles, "main"])[0]
        telling[f"{name}:{port}"] = f"shalekv-{job}"
    assert asked == telling


def test_prometheus_and_grafana_get_files_that_exist() -> None:
    """What they mount is in ops/, at the places that the files name."""
    declared = read_files(OBSERVABILITY)["configs"]
    mounted = {
        each["target"]: (DOCKER / declared[each["source"]]["file"]).resolve()
        for name in OBSERVERS
        for each in OBSERVED[name].text["configs"]
    }
    assert len(mounted) == len(declared)
    assert all(file.is_file() and file.is_relative_to(ROOT / "ops") for file in mounted.values())
    provider = yaml.safe_load((ROOT / "ops/grafana/provider.yaml").read_text())["providers"][0]
    home = OBSERVED["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == ROOT / "ops/grafana/shalekv.json"
    assert home.startswith(provider["options"]["path"])
    (rules,) = yaml.safe_load((ROOT / "ops/prometheus.yaml").read_text())["rule_files"]
    assert mounted[f"/etc/prometheus/{rules}"] == ROOT / "ops/alerts.yaml"


def test_writers_know_their_safekeepers() -> None:
    """The one that has its log in safekeepers names all of them."""
    flags = parsed(WRITERS["writer-quorum"].argv[2:]).params
    assert flags["wal"] == "quorum"
    assert flags["safekeepers"] == ",".join(f"{name}:{SAFEKEEPER_PORT}" for name in SAFEKEEPERS)


@ALL_FILES
def test_what_waits_for_health_waits_for_a_health_check(services: dict[str, Service]) -> None:
    """Compose refuses to wait for the health of a service that has no check."""
    for service in services.values():
        for name, condition in service.depends_on.items():
            other = services[name]
            if condition == "service_healthy":
                assert other.health
            if condition == "service_completed_successfully":
                assert other.text["restart"] == "no"
            assert set(other.profiles) <= set(service.profiles)


def test_what_is_fenced_stays_down() -> None:
    """A service that restarts after failures runs under the wrapper that does not restart fenced
    ones.
    """
    assert OURS
    for service in OURS.values():
        if service.text["restart"] != "no":
            assert service.text["restart"] == "on-failure"
            assert service.argv[1] == f"{SCRIPTS}stay_down.py"


@pytest.mark.parametrize("image", [OF_OURS, OF_MINIO], ids=["ours", "MinIO"])
def test_images_have_a_user(image: Image) -> None:
    """It is a number, so that an orchestrator can see that it is not root."""
    assert len(image.arguments("USER")) == 1
    assert all(number >= 1_000 for number in image.user)


@ALL_FILES
def test_nothing_runs_with_rights_that_it_does_not_need(services: dict[str, Service]) -> None:
    """Services that are built here run as the user of their image, without capabilities, and change
    only their volumes.
    """
    for service in services.values():
        assert service.text["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service.text
        assert "user" not in service.text
        if service.dockerfile:
            assert service.text["read_only"] is True
            assert service.text["cap_drop"] == ["ALL"]


def test_what_the_image_copies_is_there_and_let_through() -> None:
    """Every source of COPY is in the repository, and .dockerignore keeps nothing of it back."""
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    kept = {path for pattern in allowed for path in ROOT.glob(pattern)}
    copied = [rest.split()[:-1] for rest in OF_OURS.arguments("COPY")]
    sources = [s for each in copied if not each[0].startswith("--from") for s in each]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert ROOT / source in kept, source


def test_images_can_be_chosen_and_have_versions() -> None:
    """Each image of others is a variable with a default, which names a version."""
    text = "".join((DOCKER / name).read_text() for name in (COMPOSE, OBSERVABILITY))
    defaults = dict(variables_of(text))
    for name, service in OBSERVED.items():
        if service.is_ours:
            continue
        variable = f"SHALEKV_{name.upper()}_IMAGE"
        assert defaults[variable] == service.text["image"]
        assert re.search(r":v?\d+\.\d+", service.text["image"]), service.text["image"]


@pytest.mark.parametrize("image", [OF_OURS, OF_MINIO], ids=["ours", "MinIO"])
def test_images_are_made_of_versions_that_can_be_chosen(image: Image) -> None:
    """The base of an image is an argument, whose default names a version."""
    defaults = dict(rest.split("=") for rest in image.arguments("ARG"))
    for each in image.arguments("FROM"):
        name = re.match(r"\$\{(\w+)\}", each)
        assert name is not None, each
        assert re.search(r":[a-z\d]", defaults[name[1]]), each


def test_minio_is_that_of_the_tests() -> None:
    """The image has the version that the contract of object stores is tested with."""
    (version,) = [
        rest.removeprefix("MINIO_VERSION=")
        for rest in OF_MINIO.arguments("ARG")
        if rest.startswith("MINIO_VERSION=")
    ]
    assert f"github.com/minio/minio@{version}" == MINIO_PACKAGE
    (install,) = [rest for rest in OF_MINIO.arguments("RUN") if rest.startswith("go install")]
    assert '"github.com/minio/minio@${MINIO_VERSION}"' in install


def test_a_missing_secret_is_reported() -> None:
    """There is no default password: compose refuses to start, and names the place for it."""
    for name in EXAMPLE:
        with pytest.raises(VariableMissing, match=name):
            read_compose({k: v for k, v in EXAMPLE.items() if k != name})


@pytest.mark.parametrize("file", [COMPOSE, MINIO, TLS, OBSERVABILITY])
def test_variables_of_the_files_are_explained(file: str) -> None:
    """Each variable that a file reads is in docker/README.md."""
    readme = (DOCKER / "README.md").read_text()
    names = {name for name, _ in variables_of((DOCKER / file).read_text())}
    assert sorted(name for name in names if f"`{name}`" not in readme) == []


def test_the_image_installs_by_hash() -> None:
    """The image holds what the lock holds, byte for byte, and this repository. Nothing is resolved
    again: a release that is newer than the lock changes nothing.
    """
    installs = [rest for rest in OF_OURS.arguments("RUN") if rest.startswith("pip ")]
    assert "--require-hashes" in installs[0]
    assert "requirements/stores.lock" in installs[0]
    assert all("--no-deps" in rest for rest in installs)
    assert all("--no-index" in rest for rest in installs[1:])
    assert (ROOT / "requirements" / "stores.lock").is_file()


def test_a_stop_leaves_time_to_end() -> None:
    """Docker kills later than a writer would cut its calls off."""
    waits_ms = ServerSettings().shutdown_grace_ms
    for service in OURS.values():
        grace_s = int(service.text["stop_grace_period"].removesuffix("s"))
        assert grace_s * 1_000 >= 2 * waits_ms


def hosts(service: Service) -> set[str]:
    """The hosts with a port that the variables of a service name."""
    text = " ".join(service.environment.values())
    return set(re.findall(r"(?:@|//)([\w-]+):\d+", text))


@pytest.mark.parametrize("name", OURS)
def test_hosts_are_services_that_were_started_before(name: str) -> None:
    """A service that a container calls is in every profile of that container, and is waited for."""

    def before(service: Service) -> set[str]:
        return {n for d in service.depends_on for n in {d} | before(SERVICES[d])}

    assert hosts(OURS[name]) <= before(OURS[name])
