"""Session tokens, page tokens, the newest state that was seen, and idempotency keys."""

from __future__ import annotations

import re
import time
import uuid

import pytest

from shalekv_client import IdempotencyKeys, InvalidToken, SessionToken, WrongDatabase
from shalekv_client.routing.tokens import Freshness
from shalekv_client.scan import with_address, without_address

DATABASE, OTHER = bytes(range(16)), bytes(16)
TOKEN = SessionToken(DATABASE, 9)


@pytest.mark.parametrize("seq", [0, 1, 300, 1 << 32, (1 << 64) - 1])
def test_text_of_a_token_has_all_its_fields(seq: int) -> None:
    """The text of a token is parsed to the same token, and can be used in a URL unchanged."""
    token = SessionToken(bytes(reversed(range(16))), seq)
    assert SessionToken.parse(str(token)) == token
    assert re.fullmatch(r"[\w-]{39}", str(token), re.ASCII)


def test_text_of_a_token_stays_as_it_is() -> None:
    """The text of a token is fixed, so that later versions can read it."""
    assert str(TOKEN) == "AQABAgMEBQYHCAkKCwwNDg8AAAAAAAAACZpdM0M"


def test_every_changed_character_is_noticed() -> None:
    """A token with one changed character is refused."""
    text = str(TOKEN)
    for place in range(len(text)):
        for other in "A_z9":
            changed = text[:place] + other + text[place + 1 :]
            if changed != text:
                with pytest.raises(InvalidToken):
                    SessionToken.parse(changed)


@pytest.mark.parametrize("text", ["", "x", "ä" * 39, "=" * 39, str(TOKEN) + "A", str(TOKEN)[:-1]])
def test_other_text_is_no_token(text: str) -> None:
    """Text that is not a token is refused with `InvalidToken`."""
    with pytest.raises(InvalidToken):
        SessionToken.parse(text)


def test_token_of_a_later_version_is_recognized() -> None:
    """A token of an unknown version is refused, and the error names the version."""
    with pytest.raises(InvalidToken, match="version 2"):
        SessionToken.parse("AgABAgMEBQYHCAkKCwwNDg8AAAAAAAAACa-whRA")


def test_token_has_the_id_of_a_database() -> None:
    """A token with an invalid database id or seq cannot be made."""
    for database_id, seq in ((b"short", 1), (DATABASE, -1), (DATABASE, 1 << 64)):
        with pytest.raises(InvalidToken, match="16 bytes"):
            SessionToken(database_id, seq)


def test_greatest_seq_is_kept() -> None:
    """An older reply, or one without a database id, does not reset the state that was seen."""
    seen = Freshness()
    assert seen.token is None
    seen.note_database(DATABASE, "a:1")
    for seq in (5, 3):
        seen.seen(seq)
    seen.note_database(b"", "a:1")
    assert seen.token == SessionToken(DATABASE, 5)


def test_lone_server_may_be_given_a_new_database() -> None:
    """Without a token, a client of one address begins anew with the database that is there now."""
    seen = Freshness()
    for database_id, seq in ((DATABASE, 50), (OTHER, 2)):
        seen.note_database(database_id, "a:1")
        seen.seen(seq)
    assert seen.token == SessionToken(OTHER, 2)


def test_token_binds_to_its_database() -> None:
    """A server and a token of another database are refused, and the state that was seen is kept."""
    seen = Freshness()
    seen.advance(TOKEN, "a:1")
    with pytest.raises(WrongDatabase, match=OTHER.hex()):
        seen.note_database(OTHER, "a:1")
    with pytest.raises(WrongDatabase, match="take a token of this one"):
        seen.advance(SessionToken(OTHER, 50), "a:1")
    seen.advance(SessionToken(DATABASE, 3), "a:1")
    assert seen.token == TOKEN


@pytest.mark.parametrize("token", [b"", b"\0", b"\0shalekv", b"after k02"])
def test_page_tokens_of_a_server_are_left_alone(token: bytes) -> None:
    """A page token without an address is the server's own; with one, both parts are returned."""
    assert without_address(token) == ("", token)
    assert without_address(with_address("[::1]:7", token)) == ("[::1]:7", token)
    assert without_address(with_address("h" * 300 + ":7", token)) == ("", token)


def test_cut_page_token_has_no_address_that_anybody_knows() -> None:
    """A page token that was cut short never raises an exception."""
    whole = with_address("host:7", b"token")
    for length in range(len(whole)):
        address, rest = without_address(whole[:length])
        assert (address, rest) != ("host:7", b"token")


NOW_NS = 1_790_000_000_123_456_789


def test_keys_are_uuids_of_version_7() -> None:
    """A key has version, variant and the time, in milliseconds, at which it was made."""
    before_ms = time.time_ns() // 1_000_000
    key = uuid.UUID(bytes=IdempotencyKeys().next())
    assert (key.version, key.variant) == (7, uuid.RFC_4122)
    assert before_ms <= key.int >> 80 <= time.time_ns() // 1_000_000


def test_layout() -> None:
    """Milliseconds, version, rest of the time, variant and randomness are at their places
    in a key.
    """
    keys = IdempotencyKeys(lambda: NOW_NS, lambda count: b"\xff" * count)
    key = int.from_bytes(keys.next(), "big")
    assert key >> 80 == NOW_NS // 1_000_000
    assert (key >> 64) & 0xFFF == 456_789 * 4096 // 1_000_000
    assert key & (1 << 64) - 1 == 0b10 << 62 | (1 << 62) - 1


def test_each_key_is_greater_than_the_one_before() -> None:
    """Keys ascend even when the clock stops or goes back."""
    times = iter([NOW_NS, NOW_NS, NOW_NS - 10**9, NOW_NS + 1_000_000])
    keys = IdempotencyKeys(lambda: next(times), bytes)
    made = [keys.next() for _ in range(4)]
    assert made == sorted(set(made))


def test_two_makers_do_not_make_the_same_key() -> None:
    """Keys of two makers at the same time differ by their randomness."""
    made = {IdempotencyKeys(lambda: NOW_NS).next() for _ in range(100)}
    assert len(made) == 100
