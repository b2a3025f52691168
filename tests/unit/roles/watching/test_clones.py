"""Watches of a clone: its log begins behind what it took over, and no watch passes over that."""

from __future__ import annotations

import asyncio

from tests.kit.engine.places import Place
from tests.kit.processes.in_process import put_at, real_runtime, running, serve_settings
from tests.kit.serving.watchers import WatchClient

KEYS = [b"a", b"b", b"c"]


async def test_what_a_clone_took_over_is_not_in_its_log() -> None:
    """A watch from a commit of the parent on is closed with WAL_COLLECTED, and told where it can
    begin; there it is told what was written to the clone, compacted or not.
    """
    parent, clone = Place("watched-parent"), Place("watched-clone")
    await parent.put(*KEYS)
    await parent.clone_to(clone)
    taken_over = (await clone.manifest()).last_compacted_seq
    for is_compacted in (False, True):
        await clone.put(b"own")
        if is_compacted:
            await clone.compact()
        with real_runtime(seed=1) as runtime:
            async with (
                running(clone.store, serve_settings(), runtime) as writer,
                asyncio.TaskGroup() as tasks,
            ):
                await put_at(writer, b"new", b"v")
                client = WatchClient(writer.watches)
                serving = tasks.create_task(client.run())
                oldest_seq = 0
                for watch_id, start_seq in enumerate((1, taken_over)):
                    client.create(watch_id, start_seq=start_seq)
                    closed = await client.closed()
                    assert closed.reason == "WAL_COLLECTED"
                    oldest_seq = int(closed.metadata["oldest_seq"])
                    assert oldest_seq > taken_over
                client.create(9, start_seq=oldest_seq)
                await client.opened(9)
                found = await client.until(writer.engine.prefix.seq, 9)
                keys = [change.entry.key for commit in found for change in commit.changes]
                assert keys == [b"own", b"new"] * (1 + is_compacted)
                serving.cancel()
            await writer.leave()
