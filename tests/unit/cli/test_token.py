"""`shalekv token`: the file, what is printed where, and commands at the same time."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from shalekv.cli.main import shalekv
from shalekv.server.access.tokens import TokenFile, parse_tokens

TOKEN = re.compile(r"shalekv_[0-9A-Za-z]{12}_[0-9A-Za-z]{49}\n")


def token(*arguments: str, path: Path) -> Result:
    return CliRunner().invoke(shalekv, ["token", *arguments, "--file", str(path)])


def test_a_token_is_printed_once_and_kept_nowhere(tmp_path: Path) -> None:
    """Standard output has the token alone; the file and standard error have no part of its secret,
    and the file is for its owner.
    """
    path = tmp_path / "tokens"
    made = token("create", "alice", path=path)
    assert TOKEN.fullmatch(made.stdout), made.output
    secret = made.stdout.split("_")[2].strip()
    for shown in (path.read_text(), made.stderr, token("list", path=path).output):
        assert secret[:8] not in shown
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TokenFile(str(path)).identify(made.stdout.strip()).principal.name == "token:alice"


def test_owner_mode_and_comments_of_a_file_stay(tmp_path: Path) -> None:
    """A file that is changed keeps its mode, its comments, and is still what a link names."""
    path, link = tmp_path / "tokens", tmp_path / "link"
    path.write_text("# ours\n\n")
    path.chmod(0o640)
    link.symlink_to(path)
    assert token("create", "alice", path=link).exit_code == 0
    assert token("create", "bob", path=link).exit_code == 0
    assert token("remove", "alice", path=link).exit_code == 0
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    text = path.read_text()
    assert text.startswith("# ours\n")
    assert [each.name for each in parse_tokens(text).values()] == ["bob"]


def test_a_damaged_file_is_not_changed(tmp_path: Path) -> None:
    """The message names the line, and shows nothing of it."""
    path = tmp_path / "tokens"
    path.write_text("# fine\nsecret words of somebody\n")
    for words in (("create", "alice"), ("list",), ("remove", "alice")):
        result = token(*words, path=path)
        assert result.exit_code == 2
        assert "line 2: not five words" in result.stderr
        assert "secret words" not in result.output
    assert path.read_text() == "# fine\nsecret words of somebody\n"


def test_an_unseen_token_does_not_count(tmp_path: Path) -> None:
    """If standard output cannot be written, the file is not changed, and nothing else is left."""
    path = tmp_path / "tokens"
    assert token("create", "alice", path=path).exit_code == 0
    before = path.read_bytes()
    argv = [sys.executable, "-m", "shalekv.cli.main", "token", "create", "bob", "--file", str(path)]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 12
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["tokens"]  # noqa: PTH208


def test_commands_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Each of several commands at once adds its token."""
    path = tmp_path / "tokens"
    argv = [sys.executable, "-m", "shalekv.cli.main", "token", "create", "--file", str(path)]
    running = [
        subprocess.Popen([*argv, f"n{number}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number in range(3)
    ]
    printed = [process.communicate()[0].decode() for process in running]
    assert all(TOKEN.fullmatch(each) for each in printed), printed
    tokens = TokenFile(str(path))
    names = {tokens.identify(each.strip()).principal.name for each in printed}
    assert names == {f"token:n{number}" for number in range(3)}


def test_expired_tokens_leave_room_for_others(tmp_path: Path) -> None:
    """A name has at most two tokens that count; one is removed by its id."""
    path = tmp_path / "tokens"
    assert token("create", "alice", "--expires-days", "1", path=path).exit_code == 0
    assert token("create", "alice", path=path).exit_code == 0
    assert token("create", "alice", path=path).exit_code == 2
    (first, second) = parse_tokens(path.read_text()).values()
    line = first.line()
    path.write_text(
        path.read_text().replace(line, f"{line.rpartition(' ')[0]} 2020-01-01T00:00:00Z")
    )
    assert token("create", "alice", path=path).exit_code == 0
    assert token("remove", second.token_id, path=path).stdout == f"{second.token_id}\n"
    assert second.token_id not in parse_tokens(path.read_text())
