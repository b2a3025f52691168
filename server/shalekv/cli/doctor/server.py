"""Judges a server by what it answers: reachability, TLS, access, versions, readiness, lag. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from shalekv.cli.commands.status_problems import problems, remarks
from shalekv.cli.console.units import share, size
from shalekv.cli.doctor.diagnosis import Area, Diagnosis
from shalekv.wording import counted, duration_text, moment
from shalekv_client import CallerAccess, Role, Status

CLOCK_OFF_MS = 10_000
CLOCK_BAD_MS = 5 * 60_000
CERTIFICATE_SOON_MS = 14 * 86_400_000
LAG_MS = 10_000

_CLOCK_FIX = "timedatectl set-ntp true    # on both machines"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate of a server or of the caller."""

    owner: str  # "server" or "client"
    begins_ms: int
    ends_ms: int
    names: Sequence[str]  # hosts and addresses that it is for


@dataclass(frozen=True, slots=True)
class TimedStatus:
    """A status, and the time of this machine before and after the call."""

    status: Status
    began_ms: int
    ended_ms: int


def area_of(address: str) -> Area:
    """Return the area of a server."""
    return Area(f"server {address}")


def judge_certificate(
    area: Area, certificate: Certificate, *, now_ms: int, host: str
) -> Iterator[Diagnosis]:
    """Judge the time and the name of a certificate; `host` is the name that a server must have."""
    check = f"{certificate.owner} certificate"
    ends, left_ms = moment(certificate.ends_ms), certificate.ends_ms - now_ms
    fix = "replace its file: servers and clients read it again; `shalekv tls init DIR` for trials"
    if left_ms <= 0:
        yield area.problem(check, f"has expired at {ends}", fix)
    elif certificate.begins_ms > now_ms:
        begins = moment(certificate.begins_ms)
        yield area.problem(check, f"is valid only from {begins} on: is a clock wrong?", _CLOCK_FIX)
    elif left_ms < CERTIFICATE_SOON_MS:
        yield area.warning(check, f"expires at {ends}, in {left_ms // 3_600_000} hours", fix)
    else:
        yield area.ok(check, f"is valid until {ends}, {left_ms // 86_400_000} more days")
    if certificate.owner == "server" and not any(_fits(each, host) for each in certificate.names):
        names = ", ".join(certificate.names) or "none"
        example = certificate.names[0] if certificate.names else "NAME"
        yield area.problem(
            "server name", f"{host} is not among the names: {names}", f"--tls-server-name {example}"
        )


def _fits(name: str, host: str) -> bool:
    name, host = name.lower(), host.lower()
    if name.startswith("*."):
        return host.partition(".")[2] == name[2:]
    return name == host


def judge_exposure(
    area: Area, host: str, caller: CallerAccess, *, has_tls: bool
) -> Iterator[Diagnosis]:
    """Judge who the caller is, and who may do what."""
    principal = caller.principal or "anonymous"
    evidence = f"accepted: {principal}"
    if caller.expires_at_ms:
        evidence += f", until {moment(caller.expires_at_ms)}"
    yield area.ok("credentials", evidence)
    is_local = is_loopback_host(host)
    if caller.is_enforced:
        yield area.ok("access", "the policy is enforced")
    elif is_local:
        yield area.ok("access", "open to everybody who reaches this loopback address")
    else:
        yield area.warning(
            "access",
            f"everybody who reaches {host} may do everything: the policy is not enforced",
            "shalekv access enforce    # after roles and grants: server/docs/access.md",
        )
    if not has_tls and not is_local:
        yield area.warning(
            "tls",
            f"connections to {host} are not encrypted",
            "shalekv serve --tls-cert ... --tls-key ...    # server/docs/security.md",
        )


def is_loopback_host(host: str) -> bool:
    """Return whether only this machine reaches a host, or a socket in the file system."""
    try:
        return host in {"localhost", "unix"} or ip_address(host).is_loopback
    except ValueError:
        return False


def judge_version(area: Area, status: Status, client_version: str) -> Diagnosis:
    """Judge whether the versions of server and client go together."""
    role = status.view.role.name.lower() if status.view.role else "unknown role"
    evidence = f"{role}, server {status.version}, client {client_version}"
    if _minor(status.version) == _minor(client_version):
        return area.ok("version", evidence)
    return area.warning(
        "version", f"{evidence}: not the same release", f"pip install 'shalekv=={status.version}'"
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def judge_server_clock(area: Area, timed: TimedStatus) -> Diagnosis:
    """Judge the clock of a server against this machine's."""
    if not timed.status.wall_ms:
        return area.unchecked("clock", "the server does not tell its time: it is an older version")
    middle_ms = (timed.began_ms + timed.ended_ms) // 2
    precision_ms = (timed.ended_ms - timed.began_ms) // 2 + 1
    offset_ms = timed.status.wall_ms - middle_ms
    side = "ahead of" if offset_ms > 0 else "behind"
    evidence = (
        f"the server's is {abs(offset_ms) / 1_000:.3f} s {side} this machine's "
        f"(measured to {precision_ms / 1_000:.3f} s)"
    )
    off_ms = abs(offset_ms) - precision_ms
    if off_ms >= CLOCK_BAD_MS:
        return area.problem("clock", evidence, _CLOCK_FIX)
    if off_ms >= CLOCK_OFF_MS:
        return area.warning("clock", evidence, _CLOCK_FIX)
    return area.ok("clock", evidence)


def judge_database(area: Area, status: Status, database_id: bytes, url: str) -> Diagnosis:
    """Judge whether the server serves the database at the URL."""
    served = status.view.database_id.hex()
    if status.view.database_id == database_id:
        return area.ok("database", f"serves {served}, as at {url}")
    return area.problem(
        "database",
        f"serves {served} ({status.url}), and {url} holds {database_id.hex()}",
        f"shalekv status --addr {area.name.removeprefix('server ')}    # or correct --url",
    )


def judge_lag(area: Area, status: Status) -> Iterator[Diagnosis]:
    """Judge how far a reader is behind; nothing for a writer."""
    if status.view.role is not Role.READER:
        return
    lag_ms = status.view.staleness_ms
    evidence = f"at most {duration_text(lag_ms)} behind the writer, seq {status.view.seq}"
    if lag_ms >= LAG_MS:
        fix = f"shalekv top --once --addr {area.name.removeprefix('server ')}"
        yield area.warning("lag", evidence, fix)
    else:
        yield area.ok("lag", evidence)


def judge_state(area: Area, status: Status) -> Iterator[Diagnosis]:
    """Judge what `shalekv status` calls a problem, or remarks on."""
    fix = f"shalekv status -v --addr {area.name.removeprefix('server ')}"
    found = [*problems(status)]
    for each in found:
        yield area.problem("state", each.text, f"{fix}    # {each.advice}")
    for remark in remarks(status):
        yield area.warning("state", remark.rstrip("."), fix)
    if found:
        return
    works = "reads" if status.write_readiness is None else "reads and writes"
    memtable = status.memtable
    evidence = f"{works} work, for {duration_text(status.uptime_ms)}"
    evidence += f"; {share(memtable.bytes, memtable.bytes_max)} not compacted"
    if status.levels is not None:
        evidence += f", a read opens at most {counted(status.levels.read_amplification, 'SST')}"
        evidence += f", debt about {size(status.levels.debt_bytes)}"
    yield area.ok("state", evidence)
