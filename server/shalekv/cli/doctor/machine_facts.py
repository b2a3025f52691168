"""Gathers the facts about this machine. Needs neither root nor the network."""

from __future__ import annotations

import errno
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shalekv.cli.console.variables import CONFIG_VARIABLE, PREFIX
from shalekv.cli.doctor.machine import (
    CLIENT,
    SERVER,
    Disk,
    Libraries,
    ListenPort,
    MachineFacts,
    Requirement,
    SettingsFound,
)
from shalekv.errors import InvalidUrl
from shalekv.store.url import FileUrl, parse_url
from shalekv_client import __version__

if TYPE_CHECKING:  # of shalekv[server]
    from shalekv.settings import AnyConfig

# Each of these is needed by a server, and by few other programs.
_OF_SERVERS = ("aiobotocore", "pydantic_settings", "structlog")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
# Conditions that hold wherever ShaleKV runs.
_TRUE_CONDITION = re.compile(r"[()\s]|and|sys_platform != ['\"]win32['\"]")
_GENERATOR = re.compile(rb"^# Protobuf Python Version: ([\d.]+)", re.MULTILINE)
_SEPARATOR = re.compile(r"[-_.]+")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def settings_found(
    file: str, environment: Mapping[str, str], problems: Sequence[str]
) -> SettingsFound:
    """Return where settings come from, and what is wrong with them."""
    names = [name.upper() for name in environment if name.upper().startswith(PREFIX)]
    return SettingsFound(file, len(set(names) - {CONFIG_VARIABLE}), problems)


def machine_facts(
    url: str | None, config: AnyConfig | None, settings: SettingsFound
) -> MachineFacts:
    """Gather the facts. It may block as long as a disk that does not answer.

    `config`: None if the settings are wrong or not read; then their defaults count.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listen = "127.0.0.1:7654" if config is None else config.server.listen
    return MachineFacts(
        python=platform.python_version(),
        libraries=libraries_found(),
        files_soft=-1 if soft == resource.RLIM_INFINITY else soft,
        files_hard=-1 if hard == resource.RLIM_INFINITY else hard,
        disks=[*_disks(url, config)],
        port=listen_port(listen),
        settings=settings,
    )


def libraries_found() -> Libraries:
    """Return what is installed, from the metadata of the distributions."""
    found = {}
    for name in (SERVER, CLIENT):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.distribution(name)
    needed = [
        requirement
        for each in found.values()
        for text in each.requires or ()
        if (requirement := requirement_from(text)) is not None and requirement.name not in found
    ]
    installed = {}
    for each in needed:
        with suppress(metadata.PackageNotFoundError):
            installed[each.name] = metadata.version(each.name)
    demands = [each.metadata["Requires-Python"] or "" for each in found.values()]
    return Libraries(
        distributions={name: each.version for name, each in found.items()},
        code_version=__version__,
        requires_python=next(iter(demands), ""),
        requirements=needed,
        installed=installed,
        protobuf_generator=_generator(),
        has_server=any(find_spec(name) is not None for name in _OF_SERVERS),
        has_uvloop=find_spec("uvloop") is not None,
    )


def requirement_from(text: str) -> Requirement | None:
    """Parse a requirement of metadata; None: its condition is one that may not hold here."""
    match = _REQUIREMENT.fullmatch(text.strip())
    if match is None:
        return None
    name, bounds, condition = match[1], match[2], match[3] or ""
    extra = _EXTRA.search(condition)
    if _TRUE_CONDITION.sub("", _EXTRA.sub("", condition)):
        return None
    return Requirement(
        _SEPARATOR.sub("-", name).lower(), bounds.strip(" ()"), extra[1] if extra else ""
    )


def _generator() -> str:
    spec = find_spec("shalekv.v1")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with suppress(OSError):
            match = _GENERATOR.search((Path(folder) / "kv_pb2.py").read_bytes())
            if match:
                return match[1].decode()
    return ""


def _disks(url: str | None, config: AnyConfig | None) -> Iterator[Disk]:
    folders = {"temporary files": Path(tempfile.gettempdir())}
    if config is not None and config.disk_cache.disk_cache_path:
        folders["cache"] = Path(config.disk_cache.disk_cache_path)
    with suppress(InvalidUrl):  # without shalekv[server] it is not checked before
        place = parse_url(url) if url else None
        if isinstance(place, FileUrl):
            folders["database"] = place.path
    for purpose, folder in folders.items():
        with suppress(OSError):
            usage = shutil.disk_usage(nearest(folder))
            yield Disk(purpose, str(folder), usage.free, usage.total)


def nearest(folder: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def listen_port(address: str) -> ListenPort:
    """Return whether a server could listen there, and who does instead."""
    host, _, number = address.rpartition(":")
    if not number.isdigit():
        return ListenPort(address, None, problem="is no TCP port")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(number), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return ListenPort(address, is_free=False, owner=_owner(int(number)))
        return ListenPort(address, None, problem=error.strerror or str(error))
    return ListenPort(address, is_free=True)


def _owner(port: int) -> str:
    """Name the process that listens on a port, if it is known without root; empty: it is not."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()) in sockets:
                    return f"{_program(process)} (pid {process.name})"
    return ""


def _program(process: Path) -> str:
    """The name of a program, and the command of ours: other arguments may hold anything."""
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [Path(word).name for word in words if not word.startswith("-")]
    if SERVER in names[:2]:
        at = names.index(SERVER)
        return " ".join(names[at : at + 2])
    return names[0]


def _listening(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
