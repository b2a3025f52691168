"""`shalekv tls init`: the files, their permissions, and what openssl says of them."""

from __future__ import annotations

import stat
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from shalekv.cli.console.certificates import AUTHORITY_DAYS, Pair
from shalekv.cli.main import shalekv
from shalekv.rpc.revocation import lists_of, read_lists

SERVER, CLIENT = "sslserver", "sslclient"


def init(folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(shalekv, ["tls", "init", str(folder), *flags])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_valid(folder: Path, stem: str, authority: str, purpose: str, *more: str) -> bool:
    """Return whether openssl accepts a certificate for a purpose."""
    argv = ["openssl", "verify", "-x509_strict", "-purpose", purpose, *more]
    argv += ["-CAfile", str(folder / f"{authority}.crt"), str(folder / f"{stem}.crt")]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_certificates_serve_their_purpose_alone(tmp_path: Path) -> None:
    """A server may also connect to safekeepers; a client is of another authority than servers."""
    made = init(tmp_path / "tls", "--host", "sk1", "--host", "10.0.0.7", "--client", "alice")
    assert made.exit_code == 0, made.output
    folder = tmp_path / "tls"
    assert is_valid(folder, "server", "ca", SERVER, "-verify_hostname", "localhost")
    assert is_valid(folder, "server", "ca", SERVER, "-verify_hostname", "sk1")
    for address in ("127.0.0.1", "::1", "10.0.0.7"):
        assert is_valid(folder, "server", "ca", SERVER, "-verify_ip", address)
    assert not is_valid(folder, "server", "ca", SERVER, "-verify_hostname", "other")
    assert is_valid(folder, "server", "ca", CLIENT)
    assert is_valid(folder, "client-alice", "clients-ca", CLIENT)
    assert not is_valid(folder, "client-alice", "clients-ca", SERVER)
    assert not is_valid(folder, "client-alice", "ca", CLIENT)
    assert not is_valid(folder, "server", "clients-ca", CLIENT)
    names = Pair.at(folder, "client-alice").certificate().extensions
    (uri,) = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert uri == x509.UniformResourceIdentifier("shalekv://client/alice")


def test_only_the_owner_can_read_keys(tmp_path: Path) -> None:
    """The folder and the private keys are for their owner alone, whatever the umask is."""
    assert init(tmp_path / "tls", "--client", "alice").exit_code == 0
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    keys = {name for name in modes if name.endswith(".key")}
    assert keys == {"ca.key", "server.key", "clients-ca.key", "client-alice.key"}
    assert {modes[name] for name in keys} == {0o600}
    assert len(modes) == 2 * len(keys)


def test_another_run_adds_and_replaces_no_key(tmp_path: Path) -> None:
    """Clients and hosts are added; the certificate of servers keeps its key and its names."""
    assert init(tmp_path, "--host", "sk1").exit_code == 0
    before = contents(tmp_path)
    assert "clients-ca.crt" not in before
    assert init(tmp_path, "--client", "alice").exit_code == 0
    assert before.items() <= contents(tmp_path).items()
    before = contents(tmp_path)
    added = init(tmp_path, "--host", "sk2", "--client", "bob")
    assert "issued again" in added.output
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"server.crt"}
    assert after.keys() - before.keys() == {"client-bob.crt", "client-bob.key"}
    for host in ("localhost", "sk1", "sk2"):
        assert is_valid(tmp_path, "server", "ca", SERVER, "-verify_hostname", host)
    for client in ("alice", "bob"):
        assert is_valid(tmp_path, f"client-{client}", "clients-ca", CLIENT)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A client that exists, or a missing or damaged file, is an error that changes nothing."""
    assert init(tmp_path, "--client", "alice").exit_code == 0
    before = contents(tmp_path)
    again = init(tmp_path)
    assert (again.exit_code, "nothing is missing" in again.output) == (0, True)
    taken = init(tmp_path, "--client", "bob", "--client", "alice")
    assert (taken.exit_code, contents(tmp_path)) == (2, before)
    assert "client-alice.crt exists already" in taken.output
    (tmp_path / "ca.key").unlink()
    missing = init(tmp_path, "--client", "bob")
    assert (missing.exit_code, "ca.crt is there, and ca.key is not" in missing.output) == (2, True)
    (tmp_path / "ca.key").write_text("no key")
    before = contents(tmp_path)
    damaged = init(tmp_path, "--client", "bob")
    assert (damaged.exit_code, contents(tmp_path)) == (2, before)
    assert "cannot be used" in damaged.output


def test_authorities_may_be_elsewhere(tmp_path: Path) -> None:
    """With --authority the folder has their certificates, and not their keys."""
    folder, authority = tmp_path / "tls", tmp_path / "authority"
    flags = ("--authority", str(authority))
    assert init(folder, *flags, "--client", "alice").exit_code == 0
    assert init(folder, *flags, "--host", "sk1").exit_code == 0
    assert contents(authority).keys() == {
        f"{stem}.{kind}" for stem in ("ca", "clients-ca") for kind in ("crt", "key")
    }
    made = contents(folder)
    assert not made.keys() & {"ca.key", "clients-ca.key"}
    assert made["ca.crt"] == contents(authority)["ca.crt"]
    assert is_valid(folder, "server", "ca", SERVER, "-verify_hostname", "sk1")
    assert is_valid(folder, "client-alice", "clients-ca", CLIENT)
    for other in ((), ("--authority", str(tmp_path / "other"))):
        refused = init(folder, *other, "--host", "sk2")
        assert (refused.exit_code, contents(folder)) == (2, made), refused.output


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    """Certificates are valid for --days, and not for longer than their authority."""
    assert init(tmp_path, "--days", "30").exit_code == 0
    server = Pair.at(tmp_path, "server").certificate()
    validity = server.not_valid_after_utc - server.not_valid_before_utc
    assert timedelta(days=30) < validity < timedelta(days=31)
    assert init(tmp_path, "--days", str(AUTHORITY_DAYS), "--host", "sk1").exit_code == 0
    authority, server = (Pair.at(tmp_path, each).certificate() for each in ("ca", "server"))
    assert server.not_valid_after_utc == authority.not_valid_after_utc


def revoke(folder: Path, *names: str, flags: tuple[str, ...] = ()) -> Result:
    paths = [str(folder / name) for name in names]
    return CliRunner().invoke(shalekv, ["tls", "revoke", str(folder), *paths, *flags])


def is_good(folder: Path, stem: str, authority: str = "clients-ca") -> bool:
    """Return whether openssl accepts a certificate by the list beside its authority."""
    return is_valid(folder, stem, authority, CLIENT, "-crl_check_all")


def the_list(folder: Path, name: str = "clients-ca.crt") -> x509.CertificateRevocationList:
    (found,) = lists_of((folder / name).read_bytes())
    return found


def test_revoked_certificates_are_listed_with_those_before(tmp_path: Path) -> None:
    """Each has its place in the list of its authority, once; others stay good."""
    assert (
        init(tmp_path, "--client", "alice", "--client", "bob", "--client", "carol").exit_code == 0
    )
    authority = (tmp_path / "clients-ca.crt").read_bytes()
    made = revoke(tmp_path, "client-alice.crt")
    assert (made.exit_code, "has 1 revoked" in made.output) == (0, True), made.output
    for _ in range(2):
        assert revoke(tmp_path, "client-alice.crt", "client-bob.crt").exit_code == 0
    good = [each for each in ("alice", "bob", "carol") if is_good(tmp_path, f"client-{each}")]
    assert good == ["carol"]
    assert len(the_list(tmp_path)) == 2
    assert (tmp_path / "clients-ca.crt").read_bytes().startswith(authority)
    assert read_lists((tmp_path / "clients-ca.crt").read_bytes())
    assert not lists_of((tmp_path / "ca.crt").read_bytes())
    assert revoke(tmp_path, "server.crt").exit_code == 0
    assert not is_good(tmp_path, "server", "ca")
    assert init(tmp_path, "--client", "dave").exit_code == 0
    assert is_good(tmp_path, "client-dave")


def test_lists_are_renewed(tmp_path: Path) -> None:
    """Without a certificate, for --days, those that there are: what was revoked stays so."""
    assert init(tmp_path, "--client", "alice", "--client", "bob").exit_code == 0
    none = revoke(tmp_path)
    assert (none.exit_code, "no list" in none.output) == (2, True)
    assert revoke(tmp_path, "client-alice.crt").exit_code == 0
    before = the_list(tmp_path)
    assert revoke(tmp_path, flags=("--days", "60")).exit_code == 0
    after = the_list(tmp_path)
    assert before.next_update_utc is not None
    assert after.next_update_utc is not None
    assert timedelta(29) < after.next_update_utc - before.next_update_utc < timedelta(31)
    assert [is_good(tmp_path, f"client-{each}") for each in ("alice", "bob")] == [False, True]
    numbers = [
        each.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        for each in (before, after)
    ]
    assert numbers[0] < numbers[1]
    assert not lists_of((tmp_path / "ca.crt").read_bytes())


def test_lists_are_where_the_authority_and_its_copy_are(tmp_path: Path) -> None:
    """With --authority both files get the list, and so does another folder; others' lists stay."""
    folder, authority, later = tmp_path / "tls", tmp_path / "authority", tmp_path / "later"
    flags = ("--authority", str(authority))
    assert init(folder, *flags, "--client", "alice").exit_code == 0
    assert init(tmp_path / "other", "--client", "zoe").exit_code == 0
    assert revoke(tmp_path / "other", "client-zoe.crt").exit_code == 0
    foreign = (tmp_path / "other" / "clients-ca.crt").read_bytes()
    with (folder / "clients-ca.crt").open("ab") as file:
        file.write(foreign)
    for _ in range(2):
        assert revoke(folder, "client-alice.crt", flags=flags).exit_code == 0
    assert not is_good(folder, "client-alice")
    assert len(read_lists((folder / "clients-ca.crt").read_bytes())) == 2
    assert foreign in (folder / "clients-ca.crt").read_bytes()
    assert init(later, *flags, "--client", "bob").exit_code == 0
    assert the_list(later) == the_list(authority)
    assert (folder / "clients-ca.crt").stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_revoked_changes_nothing(tmp_path: Path) -> None:
    """Certificates of others, authorities themselves, and what is no certificate."""
    folder = tmp_path / "tls"
    assert init(folder, "--client", "alice").exit_code == 0
    assert init(tmp_path / "other", "--client", "zoe").exit_code == 0
    (tmp_path / "other" / "client-zoe.crt").rename(folder / "zoe.crt")
    before = contents(folder)
    for name in ("zoe.crt", "ca.crt", "client-alice.key", "missing.crt"):
        refused = revoke(folder, "client-alice.crt", name)
        assert (refused.exit_code, contents(folder)) == (2, before), refused.output
        assert "nothing was revoked" in refused.output
    (folder / "clients-ca.key").unlink()
    assert revoke(folder, "client-alice.crt").exit_code == 2


def test_a_file_has_one_certificate_to_revoke(tmp_path: Path) -> None:
    """Several are refused, and none of them is revoked; those of its authorities may be there."""
    assert init(tmp_path, "--client", "alice", "--client", "bob").exit_code == 0
    alice, bob, authority = (
        (tmp_path / f"{each}.crt").read_bytes()
        for each in ("client-alice", "client-bob", "clients-ca")
    )
    (tmp_path / "both.pem").write_bytes(alice + bob)
    before = contents(tmp_path)
    refused = revoke(tmp_path, "both.pem")
    assert (refused.exit_code, contents(tmp_path)) == (2, before), refused.output
    assert "both.pem has 2 certificates" in refused.output
    (tmp_path / "chain.pem").write_bytes(authority + bob)
    assert revoke(tmp_path, "chain.pem").exit_code == 0
    assert [is_good(tmp_path, f"client-{each}") for each in ("alice", "bob")] == [True, False]


@pytest.mark.parametrize(
    "flags",
    [
        ("--host", "localhost:7654"),
        ("--host", ""),
        ("--host", "a b"),
        ("--client", "../ca"),
        ("--client", ""),
        ("--client", "-x"),
        ("--days", "0"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Names that no certificate or file can have are usage errors."""
    assert init(tmp_path / "tls", *flags).exit_code == 2
    assert not (tmp_path / "tls").exists()


def test_the_advice_names_the_files(tmp_path: Path) -> None:
    """The flags that it prints are those of the commands, with files that exist."""
    advice = init(tmp_path, "--client", "NAME").output.partition("\n\n")[2]
    for word in advice.split():
        if word.startswith("/"):
            assert Path(word).is_file(), word
    for command in ("serve", "reader", "safekeeper"):
        known = CliRunner().invoke(shalekv, [command, "--help"]).output
        flags = {word for word in advice.split() if word.startswith("--tls-")} - {"--tls-ca"}
        assert {flag for flag in flags if flag not in known} == set()
