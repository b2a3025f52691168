"""Files of a load whose footers tell other keys than they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.format.footer import checksum_of, encode_footer, read_footer
from shalekv.format.names import LEVELS_FOLDER, level_name
from shalekv.format.sst_message import info_message
from shalekv.protocol.access import Verb
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.sst_table import SstInfo
from shalekv.v1 import admin_pb2, admin_pb2_grpc
from tests.kit.constants import constants
from tests.kit.engine.loading import encoded_file
from tests.kit.processes.guarded import TokenBook, guarded_writer
from tests.kit.processes.in_process import memory_store
from tests.kit.serving.guarded import policy_of, prefix
from tests.kit.serving.rpc import failure
from tests.kit.store import FaultyStore

MINE = [b"a/%d" % number for number in range(9)]  # in several blocks


def forged(
    keys: Sequence[bytes], number: int, database_id: bytes, **told: Any
) -> tuple[SstInfo, bytes]:
    """A file with these keys whose footer tells another first or last one, as long as its own."""
    sst_id = bytes.fromhex("0198c0de00007000") + (2**63 + number).to_bytes(8, "big")
    entries = [Entry(key, 0, Kind.PUT, b"v" * 20) for key in keys]
    info, data = encoded_file(database_id, sst_id, entries)
    footer = read_footer(level_name(sst_id), data, len(data), database_id=None)
    contents = replace(footer.contents, **told)
    end = encode_footer(footer.properties, contents, footer.layout)
    at = footer.layout.index_offset + footer.layout.index_len
    data = data[:at] + end
    info = replace(info, checksum=checksum_of(end), **told)
    return info, data


@pytest.mark.parametrize(
    ("keys", "told"),
    [([*MINE, b"z/0"], {"last_key": b"a/9"}), ([b"A/0", *MINE], {"first_key": b"a/0"})],
    ids=["the last key", "the first key"],
)
async def test_a_file_with_keys_out_of_the_range_of_its_caller_is_refused(
    tmp_path: Path, keys: Sequence[bytes], told: dict[str, bytes]
) -> None:
    """Though request and footer agree: the blocks of those who may not load all keys are read."""
    store, tokens = FaultyStore(memory_store()), TokenBook(tmp_path, "alice", "root")
    with constants({"shalekv.write.ingest:PIECE_BYTES": 100}):
        async with (
            guarded_writer(store, tokens) as served,
            grpc.aio.insecure_channel(served.listen) as channel,
        ):
            await served.set_policy(policy_of(alice=prefix(b"a", Verb.INGEST)))
            admin: Any = admin_pb2_grpc.AdminStub(channel)
            who = await admin.WhoAmI(admin_pb2.WhoAmIRequest(), metadata=tokens.shown("root"))
            database_id: bytes = who.header.database_id
            info, data = forged(keys, 1, database_id, **told)
            good, its_data = forged(MINE, 2, database_id)
            for each, content in ((info, data), (good, its_data)):
                await store.create(level_name(each.id), content)

            def load(name: str, sst: SstInfo) -> Any:
                request = admin_pb2.IngestSstRequest(load_id=name, ssts=[info_message(sst)])
                return admin.IngestSst(request, metadata=tokens.shown(name))

            refused = await failure(load("alice", info))
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "footer" in refused.message
            assert not (await load("alice", good)).already_applied
            before = len(store.asked("get_range", LEVELS_FOLDER))
            assert not (await load("root", info)).already_applied
            assert len(store.asked("get_range", LEVELS_FOLDER)) == before + 1, "the footer alone"
