"""The machine: versions against the metadata, limits, disks, the port, and settings."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from shalekv.cli.doctor.diagnosis import Diagnosis, Severity, summary
from shalekv.cli.doctor.machine import (
    Disk,
    Libraries,
    ListenPort,
    Requirement,
    SettingsFound,
    is_within,
    judge_disk,
    judge_files,
    judge_libraries,
    judge_port,
    judge_settings,
)
from shalekv.cli.doctor.machine_facts import libraries_found, listen_port, requirement_from

SOUND = Libraries(
    distributions={"shalekv": "0.9.0", "shalekv-client": "0.9.0"},
    code_version="0.9.0",
    requires_python=">=3.11",
    requirements=[
        Requirement("protobuf", ">=7.35.1,<8", ""),
        Requirement("click", ">=8.2,<9", "server"),
        Requirement("aiosqlite", ">=0.21,<1", "sqlite"),
        Requirement("sqlalchemy", ">=2.0.40,<3", "sqlite"),
    ],
    installed={"protobuf": "7.36.2", "click": "8.2.1"},
    protobuf_generator="7.35.1",
    has_server=True,
    has_uvloop=True,
)


def bad(found: object) -> list[tuple[Severity, str, str]]:
    assert isinstance(found, list)
    return [(d.severity, d.evidence, d.fix) for d in found if d.severity is not Severity.OK]


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("3.11.0", ">=3.11", True),
        ("3.10.9", ">=3.11", False),
        ("1.85.1", ">=1.85.1,<2", True),
        ("1.85", "<2,>=1.85.1", False),
        ("2.0.0rc1", ">=1.0,<2", False),
        ("0.9.3", "==0.9.*", True),
        ("0.10.0", "==0.9.*", False),
        ("0.8.0", "==0.8", True),
        ("2.5", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("1.2", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, bounds: str, *, fits: bool) -> None:
    """A version is within bounds if each of its numbers, not its text, is."""
    assert is_within(version, bounds) == fits


def test_sound_libraries_have_no_finding() -> None:
    """Both distributions, the client alone and the server alone are sound; extras may lack."""
    for names in (("shalekv", "shalekv-client"), ("shalekv",), ("shalekv-client",)):
        libraries = replace(SOUND, distributions=dict.fromkeys(names, "0.9.0"))
        assert bad([*judge_libraries(libraries)]) == []


@pytest.mark.parametrize(
    ("change", "evidence", "fix"),
    [
        (
            {"distributions": {"shalekv": "0.9.0", "shalekv-client": "0.8.0"}},
            "shalekv 0.9.0, shalekv-client 0.8.0: the client and the server are of different",
            "pip install 'shalekv[server]==0.9.0' 'shalekv-client==0.9.0'",
        ),
        (
            {"distributions": {"shalekv": "0.8.0"}},
            "shalekv 0.8.0 is installed, and version 0.9.0 runs",
            "pip install -e '.[server]'",
        ),
        ({"distributions": {}}, "without being installed", "pip install 'shalekv[server]'"),
        (
            {"installed": {"protobuf": "7.36.2"}},
            "click is missing, shalekv[server] needs >=8.2,<9",
            "pip install --upgrade 'shalekv[server]'",
        ),
        (
            {"installed": {"protobuf": "7.36.2", "click": "8.1"}},
            "click is 8.1, shalekv[server] needs",
            "pip install --upgrade 'shalekv[server]'",
        ),
        (
            {"installed": {"protobuf": "7.36.2", "click": "8.2", "aiosqlite": "0.21"}},
            "sqlalchemy is missing, shalekv[sqlite] needs",
            "pip install --upgrade 'shalekv[sqlite]'",
        ),
        (
            {"installed": {"protobuf": "7.35.1", "click": "8.2"}, "protobuf_generator": "7.36.0"},
            "made by protobuf 7.36.0, runs on 7.35.1",
            "pip install 'protobuf>=7.36.0'",
        ),
        ({"has_uvloop": False}, "is not installed", "pip install 'shalekv[server]'"),
    ],
)
def test_unsound_libraries_are_found(change: dict[str, object], evidence: str, fix: str) -> None:
    """Each fault is one finding, with the command that installs what is needed."""
    found = bad([*judge_libraries(replace(SOUND, **change))])  # type: ignore[arg-type] # a table
    assert len(found) == 1
    assert evidence in found[0][1]
    assert found[0][2] == fix


def test_this_environment_is_sound() -> None:
    """What the metadata of this installation demands is parsed, and is installed."""
    libraries = libraries_found()
    assert {"protobuf", "grpcio"} <= libraries.installed.keys()
    assert bad([*judge_libraries(libraries)]) == []


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hpack<5,>=4.1", Requirement("hpack", "<5,>=4.1", "")),
        ("sqlalchemy[asyncio]<3; extra == 'mysql'", Requirement("sqlalchemy", "<3", "mysql")),
        (
            "uvloop<1,>=0.21; (sys_platform != 'win32') and extra == 'server'",
            Requirement("uvloop", "<1,>=0.21", "server"),
        ),
        ("Google_CRC32c (>=1.7)", Requirement("google-crc32c", ">=1.7", "")),
        ("tomli; python_version < '3.11'", None),
    ],
)
def test_requirements_are_parsed(text: str, parsed: Requirement | None) -> None:
    """Names are normal, extras known; conditions that are not understood are left out."""
    assert requirement_from(text) == parsed


def severity(found: Diagnosis) -> str:
    return found.severity.value


def test_limits_and_disks() -> None:
    """Few files and little space are warned of, and a full disk is a problem."""
    assert severity(judge_files(256, -1)) == "ok"
    assert severity(judge_files(1_024, 65_536)) == "ok"
    assert severity(judge_files(1_024, 1_024)) == "warning"
    by_free = {10**12: "ok", 10**9: "warning", 10**8: "problem"}
    for free_bytes, expected in by_free.items():
        assert severity(judge_disk(Disk("database", "/db", free_bytes, 10**13))) == expected


def test_a_port_is_judged_by_who_listens() -> None:
    """A free port is well, one of ours as well; another program is named with another port."""
    assert severity(judge_port(ListenPort("127.0.0.1:7654", is_free=True))) == "ok"
    ours = ListenPort("127.0.0.1:7654", is_free=False, owner="shalekv serve (pid 7)")
    assert severity(judge_port(ours)) == "ok"
    other = judge_port(replace(ours, owner="nginx (pid 7)"))
    assert (severity(other), other.fix) == ("warning", "shalekv serve --listen 127.0.0.1:7655 ...")
    assert severity(judge_port(ListenPort("unix:/s", None, problem="no"))) == "not checked"


def test_the_owner_of_a_port_is_found() -> None:
    """The process that listens is found without root; a port of nobody is free."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        found = listen_port(address)
        assert found.is_free is False
        assert f"(pid {os.getpid()})" in found.owner
    assert listen_port(address).is_free
    assert listen_port("unix:/tmp/s").is_free is None


def test_wrong_settings_are_problems() -> None:
    """Each wrong setting is a problem of its own."""
    found = bad([*judge_settings(SettingsFound("a.toml", 2, ["one", "two"]))])
    assert [evidence for _, evidence, _ in found] == ["one", "two"]


def test_a_summary_counts_by_severity() -> None:
    """The summary has singular and plural, and what was not checked only if there is any."""
    each = [Diagnosis("machine", "c", severity, "e") for severity in Severity]
    assert summary(each) == "1 problem, 1 warning, 1 check passed, 1 not checked"
    assert summary([each[0], each[0]]) == "0 problems, 0 warnings, 2 checks passed"
