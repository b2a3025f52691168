"""Sentences of openings: greet, claim, vote, elect, follow, fill."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from shalekv.protocol.quorum_records import Elected, Joined, Refusal, ToProposer, Vote, VoteRequest
from tests.scenarios.quorum.stage import Stage
from tests.scenarios.reading import Scenario

Act = Callable[..., None]
ActT = TypeVar("ActT", bound=Act)

SENTENCES: list[tuple[re.Pattern[str], Act]] = []
NODES = r"(?P<nodes>[A-F](?: [A-F])*)"
NODE = r"(?P<node>[A-F])"
WRITER = r"writer (?P<writer>\d)"


def sentence(pattern: str) -> Callable[[ActT], ActT]:
    """The function carries out sentences that match; the groups are its keyword arguments."""

    def register(act: ActT) -> ActT:
        SENTENCES.append((re.compile(pattern), act))
        return act

    return register


def play(scenario: Scenario) -> None:
    """Carry out all steps; an error names its line."""
    stage = Stage()
    for step in scenario.steps:
        try:
            _carry_out(stage, step.text)
        except BaseException as error:
            error.add_note(f"tests/scenarios/quorum/{scenario.file}:{step.line}: {step.text}")
            raise


def _carry_out(stage: Stage, text: str) -> None:
    found = [(act, match) for pattern, act in SENTENCES if (match := pattern.fullmatch(text))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} meanings: {text}")
    act, match = found[0]
    act(stage, **match.groupdict())


@sentence(rf"{WRITER} opens with {NODES}")
def opens(stage: Stage, writer: str, nodes: str) -> None:
    """From beginning to end, in the epoch of its number; the others are not reached."""
    greets(stage, writer, nodes)
    claims(stage, writer, epoch=writer)
    vote(stage, nodes, writer)
    _lead(stage, writer)
    follow(stage, nodes, writer)
    fills(stage, writer, nodes)
    it = stage.writer(writer)
    assert it.leader is not None
    assert it.leader.committed_lsn == it.leader.first_own_lsn, "its fence is not committed"
    sends_commit_point(stage, writer, nodes)


@sentence(rf"{WRITER} greets {NODES}")
def greets(stage: Stage, writer: str, nodes: str) -> None:
    for node in nodes.split():
        stage.ask(stage.connect(stage.writer(writer), node))


@sentence(rf"{WRITER} claims epoch (?P<epoch>\d)")
def claims(stage: Stage, writer: str, epoch: str) -> None:
    """Claim the lowest epoch above all that it knows, by the manifest."""
    it, manifest = stage.writer(writer), stage.bucket.manifest
    assert it.may_claim, "no majority has greeted"
    assert it.epoch_to_claim(manifest) == int(epoch)
    stage.bucket.claim(int(epoch), it.nonce)
    it.claimed(int(epoch), manifest)


@sentence(rf"{WRITER} claims epoch (?P<epoch>\d), too, at a manifest id that was recycled")
def claims_too(stage: Stage, writer: str, epoch: str) -> None:
    assert stage.bucket.manifest.writer_epoch == int(epoch)
    stage.writer(writer).claimed(int(epoch), stage.bucket.manifest)


@sentence(rf"{NODES} votes? for {WRITER}")
def vote(stage: Stage, nodes: str, writer: str) -> None:
    for node in nodes.split():
        answer = _asked_to_vote(stage, node, writer)
        assert isinstance(answer, Vote), f"{node}: {answer}"


@sentence(rf"{NODE} refuses to vote for {WRITER}: (?P<problem>.+)")
def refuses_to_vote(stage: Stage, node: str, writer: str, problem: str) -> None:
    _refused(_asked_to_vote(stage, node, writer), problem)


def _asked_to_vote(stage: Stage, node: str, writer: str) -> ToProposer:
    stream = stage.stream(stage.writer(writer), node)
    assert isinstance(stream.there[0], VoteRequest)
    return stage.ask(stream)


@sentence(rf"{WRITER} is elected with the log of {NODE}")
def is_elected(stage: Stage, writer: str, node: str) -> None:
    """A majority has voted; this member's log is taken, and all of it is found there."""
    it = stage.writer(writer)
    assert it.has_won, "no majority has voted"
    assert it.candidacy is not None
    donors = {member.id: member.address for member in it.configuration.everyone}
    assert donors[it.candidacy.donor_id] == node
    _lead(stage, writer)


@sentence(rf"{WRITER} has no majority of votes")
def has_no_majority(stage: Stage, writer: str) -> None:
    assert not stage.writer(writer).has_won


@sentence(rf"{WRITER} can't open: (?P<problem>.+)")
def cannot_open(stage: Stage, writer: str, problem: str) -> None:
    """It has a majority, and must not take the log that it was offered."""
    it = stage.writer(writer)
    assert it.has_won, "no majority has voted"
    it.lead(stage.fetch, archive_tip=stage.bucket.archive_tip)
    assert it.leader is None, "it leads"
    assert problem in it.ended


@sentence(rf"{NODES} follows? {WRITER}")
def follow(stage: Stage, nodes: str, writer: str) -> None:
    """They make their logs a beginning of its log."""
    for node in nodes.split():
        answer = _election_reply(stage, node, writer)
        assert isinstance(answer, Joined), f"{node}: {answer}"


@sentence(rf"{NODE} refuses to follow {WRITER}: (?P<problem>.+)")
def refuses_to_follow(stage: Stage, node: str, writer: str, problem: str) -> None:
    _refused(_election_reply(stage, node, writer), problem)


def _election_reply(stage: Stage, node: str, writer: str) -> ToProposer:
    it = stage.writer(writer)
    if not any(s.is_open and s.member.address == node for s in it.streams):
        stage.ask(stage.connect(it, node))
    stream = stage.stream(it, node)
    assert isinstance(stream.there[0], Elected)
    return stage.ask(stream)


@sentence(rf"{WRITER} fills {NODES}")
def fills(stage: Stage, writer: str, nodes: str) -> None:
    """They are sent all that they lack, and acknowledge it."""
    it = stage.writer(writer)
    for node in nodes.split():
        stream = stage.stream(it, node)
        stage.settle(stream)
        while stream.is_open and stream.sent_lsn < it.log.last.lsn:
            it.send(stream)
            stage.settle(stream)


@sentence(rf"{WRITER} sends {NODE} one record")
def sends_one(stage: Stage, writer: str, node: str) -> None:
    stream = stage.stream(stage.writer(writer), node)
    if not stream.there:
        stage.writer(writer).send(stream)
    stage.ask(stream)


@sentence(rf"{WRITER} tells {NODES} how far the log is committed")
def sends_commit_point(stage: Stage, writer: str, nodes: str) -> None:
    for node in nodes.split():
        stream = stage.stream(stage.writer(writer), node)
        stage.writer(writer).tell_commit(stream)
        stage.settle(stream)


@sentence(rf"{WRITER} connects to {NODE}, and tells it at once how far the log is committed")
def sends_commit_point_at_once(stage: Stage, writer: str, node: str) -> None:
    it = stage.writer(writer)
    stream = stage.connect(it, node)
    it.tell_commit(stream)
    stage.ask(stream)
    stage.deliver(stream)
    stage.nodes[node].sync()


def _lead(stage: Stage, writer: str) -> None:
    it = stage.writer(writer)
    it.lead(stage.fetch, archive_tip=stage.bucket.archive_tip)
    assert it.leader is not None, f"it does not lead: {it.ended}"


def _refused(answer: object, problem: str) -> None:
    assert isinstance(answer, Refusal), f"{answer}"
    assert problem in answer.problem
