"""The part of the contract of stores that safety rests on: one object per name, for good."""

from __future__ import annotations

import asyncio
from random import Random
from typing import ClassVar

import pytest

from shalekv.errors import InvalidRequest
from shalekv.store.api import Created, Exists, ObjectStore
from tests.contract.opening import Opening, OpenStore, names_in

RACERS = 8
ROUNDS = 50
MIB = 1024 * 1024
BAD_NAMES = ("", "/", "/etc/passwd", "wal/", "wal//1", "../1", "wal/../1", "wal/..", "./1", "a\0b")
BAD_NEW_NAMES = ("wal/1.tmp", "wal/é", "wal/a\nb", "wal/\\1", "wal/" + 201 * "1", 60 * "wal/12345/")


class CreateContract(Opening):
    rounds: ClassVar[int] = ROUNDS  # of races: fewer where what decides them is raced by itself

    async def test_first_create_wins(self, store: ObjectStore, rival: ObjectStore) -> None:
        """The first create of a name makes the object, every later one changes nothing."""
        assert await store.create("wal/1.sst", b"first") == Created()
        assert await rival.create("wal/1.sst", b"second") == Exists()
        assert await store.create("wal/1.sst", b"first") == Exists()
        assert (await store.get("wal/1.sst")).data == b"first"
        assert (await rival.get("wal/1.sst")).data == b"first"

    async def test_races_have_one_winner(self, open_store: OpenStore) -> None:
        """Of eight creates of one name at once, one wins, and its bytes are the object."""
        racers = [open_store() for _ in range(RACERS)]
        for number in range(self.rounds):
            name = f"wal/{number:020d}.sst"
            bodies = [f"{name} by {racer}".encode() for racer in range(RACERS)]
            outcomes = await asyncio.gather(
                *(at.create(name, body) for at, body in zip(racers, bodies, strict=True))
            )
            winners = [i for i, outcome in enumerate(outcomes) if outcome == Created()]
            assert len(winners) == 1, outcomes
            assert outcomes.count(Exists()) == RACERS - 1, outcomes
            for racer in racers:
                assert (await racer.get(name)).data == bodies[winners[0]]
        for racer in racers:
            await racer.close()

    async def test_losers_see_the_winner_at_once(
        self, store: ObjectStore, rival: ObjectStore
    ) -> None:
        """Whoever is told that an object exists can read all of it in the same moment."""

        async def create_and_read(at: ObjectStore, name: str) -> bytes:
            await at.create(name, random.randbytes(70_000))
            return (await at.get(name)).data

        random = Random(1)
        for number in range(self.rounds):
            name = f"wal/{number}.sst"
            seen = await asyncio.gather(
                *(create_and_read(at, name) for at in (store, rival, store, rival))
            )
            assert len(set(seen)) == 1
            assert len(seen[0]) == 70_000

    async def test_created_is_seen_by_everyone(
        self, store: ObjectStore, rival: ObjectStore
    ) -> None:
        """A create that has ended is in every later read and list, whoever asks."""
        for number in range(20):
            name = f"wal/{number:020d}.sst"
            await store.create(name, str(number).encode())
            assert (await rival.get(name)).data == str(number).encode()
            assert (await names_in(rival, "wal/"))[-1] == name
            assert (await rival.head(name)).size_bytes == len(str(number))

    async def test_names_do_not_touch_each_other(self, store: ObjectStore) -> None:
        """Names that are close to each other are different objects."""
        names = ["a/1", "a/1.sst", "a/10", "a/11", "a/A", "a/a", "b/1", "a/b/1", "a/1 1"]
        for name in names:
            assert await store.create(name, name.encode()) == Created()
        for name in names:
            assert (await store.get(name)).data == name.encode()

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 65_537, 8 * MIB])
    async def test_bytes_are_exact(
        self, store: ObjectStore, rival: ObjectStore, size_bytes: int
    ) -> None:
        """An object of any size, and of any bytes, is read as it was written."""
        data = Random(size_bytes).randbytes(size_bytes)
        assert await store.create("levels/1.sst", data) == Created()
        found = await rival.get("levels/1.sst")
        assert found.data == data
        assert found.info.name == "levels/1.sst"
        assert found.info.size_bytes == size_bytes

    async def test_all_byte_values_survive(self, store: ObjectStore) -> None:
        """No byte is taken for a line end, a terminator or a character."""
        data = bytes(range(256)) + b"\r\n\0\xff\xfe" + bytes(reversed(range(256)))
        await store.create("levels/1.sst", data)
        assert (await store.get("levels/1.sst")).data == data

    async def test_metadata_is_kept_or_left_out(self, store: ObjectStore) -> None:
        """User metadata comes back as it was given, or not at all."""
        given = {"writer_epoch": "7"}
        await store.create("wal/1.sst", b"x", given)
        assert dict((await store.get("wal/1.sst")).metadata) in (given, {})

    @pytest.mark.parametrize("name", BAD_NAMES)
    async def test_names_stay_in_the_database(self, store: ObjectStore, name: str) -> None:
        """No operation takes a name that could leave the database."""
        with pytest.raises(InvalidRequest):
            await store.create(name, b"")
        with pytest.raises(InvalidRequest):
            await store.get(name)
        with pytest.raises(InvalidRequest):
            await store.get_range(name, 0, 1)
        with pytest.raises(InvalidRequest):
            await store.head(name)
        with pytest.raises(InvalidRequest):
            await store.delete(["wal/1.sst", name])

    @pytest.mark.parametrize("name", BAD_NEW_NAMES)
    async def test_names_fit_every_store(self, store: ObjectStore, name: str) -> None:
        """A name that some store could not create is created by none."""
        with pytest.raises(InvalidRequest):
            await store.create(name, b"")
