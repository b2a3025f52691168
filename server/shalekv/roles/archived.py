"""Replies that are given when what they tell of is in the object store."""

from __future__ import annotations

from collections.abc import Awaitable

from shalekv.errors import OutcomeUnknown, ShaleError
from shalekv.roles.reply_form import ReplyT
from shalekv.write.wal import LogSlots


async def archived_reply(slots: LogSlots, answer: Awaitable[ReplyT]) -> ReplyT:
    """The answer, when the object that it names is in the store, and all before it."""
    try:
        reply = await answer
    finally:
        del answer  # its error would hold this frame
    wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
    try:
        await slots.archive(wal_id)
    except ShaleError as error:
        raise OutcomeUnknown(
            "the write is durable, but whether it is in the object store is not known: "
            f"{error}. Read the key to find out, or write it again"
        ) from error
    return reply
