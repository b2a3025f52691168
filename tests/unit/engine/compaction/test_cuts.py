"""Where a merge ends one SST and begins the next, beside where it is full."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.publish import CompactorId
from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.lease import RANDOM_BYTES, new_lease_id
from shalekv.core.range_tombstones import NONE
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import SortedRun, Tree, upper_bound
from shalekv.engine.compaction.outputs import Authorship, LevelWriter, Outputs
from shalekv.engine.compaction.pace import Pace
from shalekv.format.columns import columns_of
from shalekv.format.section import Section
from shalekv.settings import LevelCodec, LevelSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.inline_runtime import finish, inline_runtime

KEYS = [b"%03d" % number for number in range(60)]
LEVELS = LevelSettings(codec=LevelCodec.NONE, block_bytes=1_024)
# All keys are in a level below the one that is written to: every range tombstone is needed.
BELOW = SstInfo(
    id=new_lease_id(2, bytes(RANDOM_BYTES)),
    level=9,
    first_key=KEYS[0],
    last_key=KEYS[-1],
    filter_offset=0,
    filter_len=0,
    block_meta_offset=0,
    block_meta_len=0,
    min_seq=1,
    max_seq=1,
    entry_count=1,
    tombstone_count=0,
    size_bytes=1,
    checksum=0,
)


def written(
    keys: list[bytes], deleted: list[tuple[bytes, bytes]], cuts: list[bytes]
) -> list[SstInfo]:
    """The SSTs of these keys, and of range tombstones over these ranges."""
    runtime = inline_runtime()
    cas = CasStore(MemoryStore(lambda: 0), runtime, StoreSettings())
    author = Authorship(
        bytes(16), CompactorId(1, bytes(16)), new_lease_id(1, bytes(RANDOM_BYTES)), 1
    )
    outputs = Outputs(
        LevelWriter(cas, author, LEVELS, Pace(runtime.clock, 0)),
        5,
        section=Section.POINTS,
        keys=KeyRange(b"", b""),
        target_bytes=100_000,
        older=OlderKeys.of([BELOW]),
        cuts=cuts,
    )
    tombstones = NONE.with_added(
        Entry(start, 9, Kind.RANGE_TOMBSTONE, end) for start, end in deleted
    )

    async def write() -> list[SstInfo]:
        for at in range(0, len(keys), 7):
            entries = [Entry(key, 10, Kind.PUT, b"v") for key in keys[at : at + 7]]
            await outputs.add(columns_of(entries), tombstones)
        return [*await outputs.finish(tombstones)]

    return finish(write())


@settings(max_examples=40, deadline=None)
@given(
    keys=st.sets(st.sampled_from(KEYS)).map(sorted),
    deleted=st.lists(
        st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS)).filter(lambda p: p[0] < p[1]),
        max_size=3,
    ),
    cuts=st.sets(st.sampled_from(KEYS)).map(sorted),
)
def test_no_sst_has_keys_on_both_sides_of_a_cut(
    keys: list[bytes], deleted: list[tuple[bytes, bytes]], cuts: list[bytes]
) -> None:
    """Rows and range tombstones are divided at each cut, nothing is lost, and the run is one."""
    infos = written(keys, deleted, cuts)
    assert sum(info.entry_count - info.tombstone_count for info in infos) == len(keys)
    for cut in cuts:
        across = [i for i in infos if i.first_key < cut < upper_bound(i)]
        assert across == [], cut
    assert len(SortedRun.of(5, infos).ssts) == len(infos)


def test_tree_accepts_neighbours_that_share_a_border() -> None:
    """A range tombstone that is cut ends where the next SST begins."""
    first, second = written([], [(KEYS[3], KEYS[50])], [KEYS[30]])
    assert (first.last_key, second.first_key) == (KEYS[30], KEYS[30])
    tree = Tree(1, 1, 10, (), [SortedRun.of(5, [first, second])], ())
    assert [info.id for info in tree.sources_of(KEYS[30])] == [second.id]
