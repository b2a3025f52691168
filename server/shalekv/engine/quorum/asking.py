"""Asking the members of a quorum what they hold, all at once, until enough have answered."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shalekv.errors import ShaleError
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.tail import Answer, sound_ids
from shalekv.write.quorum.links import LinkBroken, Links


class Asked(NamedTuple):
    """What came of it."""

    answers: Mapping[bytes, Answer]  # by member
    silent: Collection[bytes]  # they were not reached, or are no members any more


async def ask_members(
    links: Links, configuration: Configuration, database_id: bytes, *, wait_ms: float
) -> Asked:
    """Ask all, and return when a majority of sound ones has answered, or nobody more will.

    After `wait_ms` whoever has not answered is `silent`; who was not waited for is neither.
    """
    answers: dict[bytes, Answer] = {}
    silent: set[bytes] = set()
    everyone = configuration.everyone
    enough = asyncio.Event()

    async def ask(member: Member) -> None:
        answer = await _ask(links, member, database_id)
        if answer is None:
            silent.add(member.id)
        else:
            answers[member.id] = answer
        is_all = len(answers) + len(silent) == len(everyone)
        if is_all or configuration.is_majority(sound_ids(answers)):
            enough.set()

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(member)) for member in everyone]
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await enough.wait()
        except TimeoutError:
            silent |= {member.id for member in everyone} - answers.keys()
        for task in asking:
            task.cancel()
    return Asked(answers, silent)


async def _ask(links: Links, member: Member, database_id: bytes) -> Answer | None:
    """None: it is not there, or is another one now."""
    try:
        status = await links.status(member.address, database_id)
    except (LinkBroken, ShaleError):
        return None
    for each in status.members:
        if each.member_id == member.id and each.place.database_id == database_id:
            return Answer(each.health, each.log, each.committed_lsn)
    return None
