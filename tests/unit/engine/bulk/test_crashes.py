"""Loads by processes that die, at each of their requests: all or nothing, and never twice."""

from __future__ import annotations

import pytest

from shalekv.engine.loads import Loaded
from tests.kit.engine.collection import Ground
from tests.kit.engine.loading_jobs import (
    LOAD_ID,
    Died,
    MortalStore,
    collect,
    level_names,
    load,
    look,
    named_files,
    process,
    rows_of,
    write,
)

VALUE = b"loaded" * 5
KEYS = [b"k%02d" % number for number in range(20)]
ROWS = rows_of([(key, VALUE) for key in KEYS], deletes=[b"gone"])
REQUESTS_MAX = 500  # of one load


async def prepared() -> Ground:
    """A database with keys that the load overwrites, deletes, and leaves alone."""
    ground = await Ground.created()
    await write(ground, k03=b"old", gone=b"old", other=b"old")
    return ground


async def dies(ground: Ground, at: int, *, takes_effect: bool) -> bool:
    """Whether a process that loads dies on its way, as it does at request `at` if there is one."""
    store = MortalStore(ground.another_store(), at, takes_effect=takes_effect)
    try:
        await load(process(ground, store), ROWS)
    except* Died:
        pass
    return store.requests > at


async def check_loaded(ground: Ground, loaded: Loaded) -> None:
    """All of the load is there, once and under one number, and what it did not touch."""
    state, loads = await look(ground)
    found = dict(state)
    assert found.pop(b"other")[0] == b"old"
    assert found == dict.fromkeys(KEYS, (VALUE, loaded.seq))
    assert loads.count(LOAD_ID) == 1


@pytest.mark.parametrize("is_collected", [False, True], ids=["at once", "collected"])
@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
async def test_what_is_run_again_is_loaded_once(*, takes_effect: bool, is_collected: bool) -> None:
    """Wherever a process dies, what is read is all of the load or nothing; run again it is all of
    it, once; and the collector takes what no commit names, and nothing else.
    """
    at = 0
    outcomes = set()
    ground = await prepared()
    while await dies(ground, at, takes_effect=takes_effect):
        before = await look(ground)
        was_committed = LOAD_ID in before.loads
        left = (before.state[b"k03"][0], len(before.state))
        assert left == ((VALUE, 21) if was_committed else (b"old", 3)), at
        if is_collected:
            await collect(ground)
            assert level_names(ground) == await named_files(ground), at
        again = await load(process(ground), ROWS)
        assert again.already_applied == was_committed, at
        await collect(ground)
        assert level_names(ground) == await named_files(ground), at
        await check_loaded(ground, again)
        assert (await load(process(ground), ROWS)).already_applied, at
        outcomes.add(was_committed)
        at += 1
        assert at < REQUESTS_MAX
        ground = await prepared()
    assert outcomes == {False, True}
    assert LOAD_ID in (await look(ground)).loads
