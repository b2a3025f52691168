"""Judges this machine: Python, libraries, files, disks, the port and the settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shalekv.cli.console.units import size
from shalekv.cli.doctor.diagnosis import INSTALL_SERVER, Area, Diagnosis
from shalekv.wording import counted

FILES_MIN = 4_096  # connections, WAL objects and SSTs of a loaded server
DISK_LOW_BYTES = 2_000_000_000
DISK_FULL_BYTES = 200_000_000
SERVER, CLIENT = "shalekv", "shalekv-client"
# An extra was asked for if this library of it is installed: others are used by other programs, too.
DRIVERS: Mapping[str, str] = {
    "azure": "obstore",
    "etcd": "etcd3gw",
    "gcs": "obstore",
    "mysql": "asyncmy",
    "postgres": "asyncpg",
    "spark": "pyspark",
    "sqlite": "aiosqlite",
}

MACHINE = Area("machine")
_BOUND = re.compile(r"(>=|<=|==|!=|~=|>|<)\s*([^,\s]+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A library that the metadata of a distribution demands."""

    name: str
    bounds: str  # such as ">=1.85.1,<2"
    extra: str  # that it belongs to; empty: it is always needed


@dataclass(frozen=True, slots=True)
class Libraries:
    """The distributions of ShaleKV, what they demand, and what is installed."""

    distributions: Mapping[str, str]  # version by name
    code_version: str  # of the code that runs
    requires_python: str
    requirements: Sequence[Requirement]
    installed: Mapping[str, str]  # version by name of a required library; what is missing is not in
    protobuf_generator: str  # the version that made the generated code; empty: not known
    has_server: bool  # the extra `server` was asked for
    has_uvloop: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder, and the space on its disk."""

    purpose: str
    path: str
    free_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ListenPort:
    """The address on which a server would listen by its settings."""

    address: str
    is_free: bool | None  # None: not known
    owner: str = ""  # the process that listens; empty: not known
    problem: str = ""  # why it is not known


@dataclass(frozen=True, slots=True)
class SettingsFound:
    """The settings in the environment and in the file of SHALEKV_CONFIG."""

    file: str  # empty: none
    variables: int  # of ShaleKV in the environment
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts about this machine."""

    python: str
    libraries: Libraries
    files_soft: int  # -1: no limit
    files_hard: int
    disks: Sequence[Disk]
    port: ListenPort
    settings: SettingsFound


def judge_machine(facts: MachineFacts) -> list[Diagnosis]:
    """Judge all facts about a machine."""
    return [
        _python(facts),
        *judge_libraries(facts.libraries),
        judge_files(facts.files_soft, facts.files_hard),
        *map(judge_disk, facts.disks),
        judge_port(facts.port),
        *judge_settings(facts.settings),
    ]


def _python(facts: MachineFacts) -> Diagnosis:
    demanded = facts.libraries.requires_python
    evidence = f"Python {facts.python}, needs {demanded or 'what is not known'}"
    if is_within(facts.python, demanded):
        return MACHINE.ok("python", evidence)
    return MACHINE.problem(
        "python", evidence, "python3.11 -m venv .venv && .venv/bin/pip install 'shalekv[server]'"
    )


def judge_libraries(libraries: Libraries) -> Iterator[Diagnosis]:
    """Judge the versions of ShaleKV itself and of what it needs."""
    yield _distributions(libraries)
    wanted = {"", "server"} if libraries.has_server else {""}  # "" has what is always installed
    wanted |= {extra for extra, lib in DRIVERS.items() if lib in libraries.installed}
    needed = [each for each in libraries.requirements if each.extra in wanted]
    wrong = [*_wrong_libraries(needed, libraries.installed)]
    yield from wrong
    if not wrong:
        extras = ", ".join(sorted(wanted - {""}))
        target = f"{SERVER}[{extras}]" if extras else SERVER
        count = len({each.name for each in needed})
        yield MACHINE.ok("libraries", f"{count} libraries of {target} fit the metadata")
    yield _generated_code(libraries)
    if not libraries.has_server:
        yield MACHINE.ok(
            "server", f"not installed: commands of clients work; for others: {INSTALL_SERVER}"
        )
    elif libraries.has_uvloop:
        yield MACHINE.ok("uvloop", "the faster event loop is installed")
    else:
        yield MACHINE.problem("uvloop", "is not installed: servers do not start", INSTALL_SERVER)


def _distributions(libraries: Libraries) -> Diagnosis:
    versions = libraries.distributions
    evidence = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if not versions:
        return MACHINE.warning(
            "shalekv",
            f"version {libraries.code_version} runs without being installed",
            "pip install 'shalekv[server]'",
        )
    if len(set(versions.values())) > 1:
        return MACHINE.problem(
            "shalekv",
            f"{evidence}: the client and the server are of different versions",
            f"pip install 'shalekv[server]=={libraries.code_version}' "
            f"'{CLIENT}=={libraries.code_version}'",
        )
    if libraries.code_version not in versions.values():
        return MACHINE.warning(
            "shalekv",
            f"{evidence} is installed, and version {libraries.code_version} runs",
            "pip install -e '.[server]'",
        )
    return MACHINE.ok("shalekv", evidence)


def _wrong_libraries(
    needed: Sequence[Requirement], installed: Mapping[str, str]
) -> Iterator[Diagnosis]:
    for name in sorted({each.name for each in needed}):
        demands = [each for each in needed if each.name == name]
        version = installed.get(name)
        extra = next((each.extra for each in demands if each.extra), "")
        target = f"{SERVER}[{extra}]" if extra else SERVER
        fix = f"pip install --upgrade '{target}'"
        bounds = demands[0].bounds
        if version is None:
            yield MACHINE.problem("libraries", f"{name} is missing, {target} needs {bounds}", fix)
        elif not all(is_within(version, each.bounds) for each in demands):
            yield MACHINE.problem("libraries", f"{name} is {version}, {target} needs {bounds}", fix)


def _generated_code(libraries: Libraries) -> Diagnosis:
    made, runs = libraries.protobuf_generator, libraries.installed.get("protobuf", "")
    if not made or not runs:
        return MACHINE.unchecked("generated code", "the version that made it was not found")
    evidence = f"made by protobuf {made}, runs on {runs}"
    if is_within(runs, f">={made}"):
        return MACHINE.ok("generated code", evidence)
    return MACHINE.problem("generated code", evidence, f"pip install 'protobuf>={made}'")


def judge_files(soft: int, hard: int) -> Diagnosis:
    """Judge the limits of open files; a server raises the soft one itself. -1: no limit."""
    evidence = f"at most {_limit(hard)} (now {_limit(soft)}; servers raise that)"
    if hard < 0 or hard >= FILES_MIN:
        return MACHINE.ok("open files", evidence)
    return MACHINE.warning(
        "open files",
        f"{evidence}: too few for many connections",
        "ulimit -Hn 65536    # as root; for systemd: LimitNOFILE=65536",
    )


def _limit(files: int) -> str:
    return "any number" if files < 0 else f"{files:,}"


def judge_disk(disk: Disk) -> Diagnosis:
    """Judge the space that a disk has left."""
    check = f"disk ({disk.purpose})"
    evidence = f"{size(disk.free_bytes)} of {size(disk.size_bytes)} are free for {disk.path}"
    fix = f"du -xh --max-depth=2 {disk.path} | sort -h | tail"
    if disk.free_bytes < DISK_FULL_BYTES:
        return MACHINE.problem(check, evidence, fix)
    if disk.free_bytes < DISK_LOW_BYTES:
        return MACHINE.warning(check, evidence, fix)
    return MACHINE.ok(check, evidence)


def judge_port(port: ListenPort) -> Diagnosis:
    """Judge whether a server could listen; one of ours that does is no fault."""
    if port.is_free is None:
        return MACHINE.unchecked("port", f"{port.address}: {port.problem}")
    if port.is_free:
        return MACHINE.ok("port", f"{port.address} is free")
    if "shalekv" in port.owner:
        return MACHINE.ok("port", f"{port.address} is used by {port.owner}")
    host, _, number = port.address.rpartition(":")
    return MACHINE.warning(
        "port",
        f"{port.address} is used by {port.owner or 'a process of another user'}",
        f"shalekv serve --listen {host}:{int(number) + 1} ...",
    )


def judge_settings(found: SettingsFound) -> Iterator[Diagnosis]:
    """Judge the settings: every command refuses wrong ones."""
    where = f"{counted(found.variables, 'variable')} in the environment"
    where += f", and {found.file}" if found.file else ", no file"
    for problem in found.problems:
        yield MACHINE.problem(
            "settings", problem, "correct it where it is set: server/docs/settings.md has all names"
        )
    if not found.problems:
        yield MACHINE.ok("settings", where)


def is_within(version: str, bounds: str) -> bool:
    """Return whether a version satisfies bounds such as ``>=1.2,<2``; what is unknown does."""
    return all(_satisfies(version, *found) for found in _BOUND.findall(bounds))


def _satisfies(version: str, operator: str, bound: str) -> bool:
    have, limit = _numbers(version), _numbers(bound)
    width = max(len(have), len(limit))
    if bound.endswith(".*"):
        have, width = have[: len(limit)], len(limit)
    left, right = (each + (0,) * (width - len(each)) for each in (have, limit))
    match operator:
        case ">=":
            return left >= right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case "<":
            return left < right
        case "!=":
            return left != right
        case "~=":
            return left >= right and have[: len(limit) - 1] == limit[:-1]
        case _:
            return left == right


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without what follows them."""
    found = _NUMBERS.match(version)
    return tuple(map(int, found[0].split("."))) if found else ()
