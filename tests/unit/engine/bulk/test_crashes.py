"""Loads by processes that die at each of their requests: all or nothing, and never twice."""

from __future__ import annotations

from shalekv.engine.loads import Loaded
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.engine.loading_jobs import (
    LOAD_ID,
    collect,
    level_names,
    load,
    look,
    named_files,
    process,
    rows_of,
    write,
)
from tests.kit.store import MortalProcess, dying_at_each_request

VALUE = b"loaded" * 5
KEYS = [b"k%02d" % number for number in range(20)]
ROWS = rows_of([(key, VALUE) for key in KEYS], deletes=[b"gone"])


async def check_loaded(database: CollectedDatabase, loaded: Loaded) -> None:
    """All of the load is there, once and under one number, and what it did not touch."""
    state, loads = await look(database)
    found = dict(state)
    assert found.pop(b"other")[0] == b"old"
    assert found == dict.fromkeys(KEYS, (VALUE, loaded.seq))
    assert loads.count(LOAD_ID) == 1


async def test_load_that_is_run_again_is_loaded_once() -> None:
    """Wherever a process dies, what is read is all of the load or nothing; run again it is all of
    it, once; and the collector takes what no commit names, and nothing else.
    """
    original = await CollectedDatabase.created()
    await write(original, k03=b"old", gone=b"old", other=b"old")
    outcomes = set()

    async def run(dying: MortalProcess) -> None:
        database = original.copy()
        store = dying.store(database.another_store())
        await dying.run(load(process(database, store), ROWS))
        before = await look(database)
        was_committed = LOAD_ID in before.loads
        found = (before.state[b"k03"][0], len(before.state))
        assert found == ((VALUE, 21) if was_committed else (b"old", 3))
        if dying.dies_at % 2:
            await collect(database)
            assert level_names(database) == await named_files(database)
        again = await load(process(database), ROWS)
        assert again.already_applied == was_committed
        await collect(database)
        assert level_names(database) == await named_files(database)
        await check_loaded(database, again)
        assert (await load(process(database), ROWS)).already_applied
        outcomes.add(was_committed)

    assert await dying_at_each_request(run) > 20
    assert outcomes == {False, True}
