"""`shalekv tls`: create the certificates with which TLS can be tried."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shalekv.cli.console.certificates import (
    AUTHORITY_DAYS,
    Authority,
    Pair,
    alternatives_of,
    name_of_host,
)
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import printing
from shalekv.rpc.revocation import lists_of, without_lists

DAYS_DEFAULT = 365
LIST_DAYS_DEFAULT = 30
FOLDER_MODE = 0o700
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
CLIENT_URI = "shalekv://client/"

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_HELP = """Create certificates for a trial of TLS in the folder DIR.

There are two authorities: one of servers (writers, readers, safekeepers), and one of clients. So a
client cannot connect to a safekeeper, which trusts servers alone. The output says which flags take
which files.

\b
ca.crt, ca.key                   the authority of servers
server.crt, server.key           a certificate for all servers
clients-ca.crt, clients-ca.key   the authority of clients, if there are any
client-NAME.crt, .key            the certificate of a client; its principal is
                                 uri:shalekv://client/NAME

Run it again to add clients or hosts: the authorities and all keys stay as they are. Whoever has
ca.key or clients-ca.key can make certificates: keep both away from servers and clients, such as by
--authority. For more than a trial, take certificates of an authority that renews them.

\b
Examples:
  shalekv tls init tls --client alice --client bob
  shalekv tls init tls --host db.example.org --host 10.0.0.7 --days 30
  shalekv tls init tls --authority ~/authority --host db.example.org
"""

_REVOKE_HELP = """Revoke certificates that `shalekv tls init` has made in the folder DIR.

The file of their authority (clients-ca.crt, or ca.crt for servers) gets a list of revoked
certificates, or a newer one. Put it where --tls-client-ca of the servers names it, if it is not
there already: it is read again when it changes, and revoked certificates are refused at the next
handshake. Connections that exist go on.

A list has an end, after which all certificates of the authority are refused. Without a CERTIFICATE,
the lists that there are are renewed: do it in time, such as once a week.

\b
Examples:
  shalekv tls revoke tls tls/client-alice.crt
  shalekv tls revoke tls --days 60
  shalekv tls revoke tls tls/client-alice.crt --authority ~/authority
"""

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
_AUTHORITY = click.option(
    "--authority",
    "authority_folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the authorities; DIR gets copies of their certificates, without the keys.  "
    "[default: DIR itself]",
)


@click.group()
def tls() -> None:
    """Create certificates for trials, and revoke them."""


def _hosts(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    for value in values:
        if not _is_address(value) and _DNS_NAME.fullmatch(value) is None:
            raise click.BadParameter(f"{value!r} is neither a name in DNS nor an IP address")
    return tuple(values)


def _clients(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> tuple[str, ...]:
    for value in values:
        if _CLIENT_NAME.fullmatch(value) is None:
            raise click.BadParameter(
                f"{value!r} is not a name of 1 to 64 letters, digits, '.', '_' and '-' that begins "
                "with a letter or digit"
            )
    return tuple(dict.fromkeys(values))


@tls.command(help=_HELP, epilog=exit_codes_text())
@_FOLDER
@_AUTHORITY
@click.option(
    "--host",
    "hosts",
    metavar="HOST",
    multiple=True,
    callback=_hosts,
    help="A name or IP address of a server, in addition to localhost, 127.0.0.1 and ::1. "
    "Repeatable.",
)
@click.option(
    "--client",
    "clients",
    metavar="NAME",
    multiple=True,
    callback=_clients,
    help="The name of a client. Repeatable.",
)
@click.option(
    "--days",
    type=click.IntRange(1, AUTHORITY_DAYS),
    default=DAYS_DEFAULT,
    show_default=True,
    metavar="DAYS",
    help="How long the new certificates are valid. New authorities are valid for "
    f"{AUTHORITY_DAYS} days.",
)
def init(
    *,
    folder: Path,
    authority_folder: Path | None,
    hosts: Sequence[str],
    clients: Sequence[str],
    days: int,
) -> None:
    """Create what is missing, and say how it is used."""
    trial = _Trial(folder.absolute(), (authority_folder or folder).absolute())
    try:
        trial.create(hosts, clients, days)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{folder} cannot be used: {error}") from None
    with printing():
        for line in (*(trial.done or ("nothing is missing",)), "", *trial.advice()):
            click.echo(line)


@tls.command(help=_REVOKE_HELP, epilog=exit_codes_text())
@_FOLDER
@click.argument(
    "certificates",
    metavar="[CERTIFICATE]...",
    nargs=-1,
    type=click.Path(dir_okay=False, path_type=Path),
)
@_AUTHORITY
@click.option(
    "--days",
    type=click.IntRange(1, AUTHORITY_DAYS),
    default=LIST_DAYS_DEFAULT,
    show_default=True,
    metavar="DAYS",
    help="How long the lists are valid. After it all certificates of the authority are refused.",
)
def revoke(
    *, folder: Path, certificates: Sequence[Path], authority_folder: Path | None, days: int
) -> None:
    """Write lists of revoked certificates, and say where."""
    trial = _Trial(folder.absolute(), (authority_folder or folder).absolute())
    try:
        trial.revoke(certificates, days)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise click.UsageError(f"nothing was revoked: {problem}") from None
    except ValueError as error:
        raise click.UsageError(f"nothing was revoked: {error}") from None
    with printing():
        for line in trial.done:
            click.echo(line)


class _Trial:
    """The files of two folders, which may be the same; `done` tells what was changed."""

    def __init__(self, folder: Path, authority_folder: Path) -> None:
        self._folder = folder
        self._authority_folder = authority_folder
        self._authority = Pair.at(authority_folder, "ca")
        self._server = Pair.at(folder, "server")
        self._of_clients = Pair.at(authority_folder, "clients-ca")
        self.done: list[str] = []

    def create(self, hosts: Sequence[str], clients: Sequence[str], days: int) -> None:
        """Create what is missing.

        Raises `OSError` and `ValueError`, before anything is changed, when a file exists that must
        not, when one is missing beside another, and when one is damaged.
        """
        pairs = {name: Pair.at(self._folder, f"client-{name}") for name in clients}
        self._check([*pairs.values()])
        for folder in (self._folder, self._authority_folder):
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._create_server(self._opened(self._authority, "servers"), hosts, days)
        if pairs:
            authority = self._opened(self._of_clients, "clients")
            for name, pair in pairs.items():
                uri = x509.UniformResourceIdentifier(CLIENT_URI + name)
                key = pair.write_key().public_key()
                pair.write_certificate(
                    authority.issue(name, key, [uri], days=days, is_server=False)
                )
                self.done.append(f"created {pair.certificate_path} of uri:{uri.value}")

    def revoke(self, paths: Sequence[Path], days: int) -> None:
        """Write lists of revoked certificates: with these, or those that there are again.

        Raises `OSError` and `ValueError`, before anything is changed, when an authority or a
        certificate is missing or damaged, and when no authority has issued it.
        """
        left = {path: _certificate_in(path) for path in paths}
        new: dict[Path, bytes] = {}
        for pair in (self._authority, self._of_clients):
            if not pair.exists:
                continue
            authority, pem = Authority.read(pair), pair.certificate_path.read_bytes()
            issued = [path for path in left if authority.has_issued(left[path])]
            if issued or (not paths and lists_of(pem)):
                certificates = [left.pop(path) for path in issued]
                listed = authority.revoke(certificates, pem, days=days)
                end = f"{listed.next_update_utc:%Y-%m-%d %H:%M} UTC"
                for path in dict.fromkeys((pair.certificate_path, self._copy(pair))):
                    rest = without_lists(path.read_bytes(), authority.certificate)
                    new[path] = rest + listed.public_bytes(Encoding.PEM)
                    told = f"{path} has {len(listed)} revoked, in a list valid until {end}"
                    self.done.append(told)
        if left:
            raise ValueError(f"no authority there has issued {', '.join(map(str, left))}")
        if not new:
            raise ValueError("there is no list of revoked certificates to renew")
        for path, pem in new.items():
            Pair.at(path.parent, path.stem).write_certificates(pem)

    def advice(self) -> Iterator[str]:
        """Say how the files are used."""
        authority, of_clients = map(self._copy, (self._authority, self._of_clients))
        own = f"--tls-cert {self._server.certificate_path} --tls-key {self._server.key_path}"
        of_server = of_client = ""
        if of_clients.exists():
            of_server = f" --tls-client-ca {of_clients}"
            pair = Pair.at(self._folder, "client-NAME")
            of_client = f" --tls-cert {pair.certificate_path} --tls-key {pair.key_path}"
        yield "Flags of `shalekv serve` and `shalekv reader`:"
        yield f"  {own} --tls-server-ca {authority}{of_server}"
        yield "Flags of `shalekv safekeeper` and of its commands:"
        yield f"  {own} --tls-client-ca {authority}"
        yield "Flags of clients, such as `shalekv get`:"
        yield f"  --tls-ca {authority}{of_client}"

    def _check(self, new: Sequence[Pair]) -> None:
        """Raise if files are there that must not be, or not whole."""
        for pair in new:
            if pair.exists:
                raise FileExistsError(f"{pair.certificate_path} exists already")
        has_authority = self._authority.exists
        if self._server.exists and not has_authority:
            raise FileNotFoundError(f"{self._server.certificate_path} is there without its ca.crt")
        for pair in (self._authority, self._of_clients):
            own = Authority.read(pair).certificate if pair.exists else None
            copy = self._copy(pair)
            if copy.exists() and x509.load_pem_x509_certificate(copy.read_bytes()) != own:
                raise ValueError(f"{copy} is not that of {pair.certificate_path}")

    def _copy(self, pair: Pair) -> Path:
        """Return the place of the certificate of an authority for servers and clients."""
        return self._folder / pair.certificate_path.name

    def _opened(self, pair: Pair, whose: str) -> Authority:
        if pair.exists:
            authority = Authority.read(pair)
        else:
            authority = Authority.create(pair, f"{whose} {secrets.token_hex(4)}")
            self.done.append(f"created {pair.certificate_path}, the authority of {whose}")
        copy = Pair.at(self._folder, pair.certificate_path.stem)
        if not copy.certificate_path.exists():
            copy.write_certificates(pair.certificate_path.read_bytes())
        return authority

    def _create_server(self, authority: Authority, hosts: Sequence[str], days: int) -> None:
        """Create the certificate of servers, or a new one for its key that has more hosts."""
        pair, has_one = self._server, self._server.exists
        names = [name_of_host(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts))]
        if has_one:
            old = alternatives_of(pair.certificate())
            names = [*old, *(each for each in names if each not in old)]
            if names == old:
                return
        key = (pair.key() if has_one else pair.write_key()).public_key()
        pair.write_certificate(authority.issue("server", key, names, days=days, is_server=True))
        how = "issued again" if has_one else "created"
        self.done.append(
            f"{how} {pair.certificate_path} for {', '.join(str(name.value) for name in names)}"
        )


def _certificate_in(path: Path) -> x509.Certificate:
    """Return the certificate of a file, which may have those of its authorities as well.

    Raises `OSError`, and `ValueError` if it is damaged, or has several.
    """
    found = x509.load_pem_x509_certificates(path.read_bytes())
    alone = [each for each in found if not _is_authority(each)] or found
    if len(alone) > 1:
        raise ValueError(f"{path} has {len(alone)} certificates: give each in a file of its own")
    return alone[0]


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return found.value.ca


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
