"""Messages of the quorum WAL on the wire are decoded as they were encoded, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.errors import BadChecksum, InvalidRequest
from shalekv.format.quorum.messages import (
    propose_reply,
    propose_request,
    relay_request,
    relayed_append,
    to_acceptor,
    to_proposer,
)
from shalekv.protocol.quorum_records import (
    EMPTY_LOG,
    NO_BALLOT,
    Append,
    Appended,
    Archived,
    Elected,
    EpochSection,
    Greet,
    Greeting,
    Joined,
    LogEnd,
    LogHealth,
    LogShape,
    Refusal,
    ToAcceptor,
    ToProposer,
    Vote,
    VoteRequest,
)
from shalekv.v1 import safekeeper_pb2 as wire
from tests.kit.quorum.messages import BALLOT, BASE, BOUNDARY, ID, RECORD, SHAPE, TARGET


@pytest.mark.parametrize(
    "message",
    [
        Greet(),
        VoteRequest(ID, BALLOT),
        Elected(ID, BALLOT, SHAPE),
        Elected(ID, NO_BALLOT, EMPTY_LOG),
        Append(BALLOT, (RECORD, BOUNDARY), 5, ID),
        Append(BALLOT, (), 0),
        Append(BALLOT, (RECORD,), 5, ID, (TARGET, TARGET)),
        Append(BALLOT, (), 5, commit_peers=(TARGET,)),
    ],
)
def test_from_a_writer(message: ToAcceptor) -> None:
    """Each message of a writer is decoded as it was encoded."""
    data = propose_request(message).SerializeToString()
    assert to_acceptor(wire.ProposeRequest.FromString(data)) == message


@pytest.mark.parametrize(
    "message",
    [
        *(Greeting(ID, BALLOT, SHAPE, 8, health) for health in LogHealth),
        Vote(BALLOT, SHAPE, 8),
        Joined(BALLOT, 9),
        Appended(BALLOT, 9),
        Appended(BALLOT, 0, 0, is_full=True),
        Archived(BALLOT, 0),
        Refusal(BALLOT, "epoch 9 was promised since"),
    ],
)
def test_from_a_member(message: ToProposer) -> None:
    """Each message of a member is decoded as it was encoded."""
    data = propose_reply(message).SerializeToString()
    assert to_proposer(wire.ProposeReply.FromString(data)) == message


def test_from_a_member_to_another() -> None:
    """A relayed append is decoded as it was encoded, and names its recipient."""
    message = Append(BALLOT, (RECORD,), 5, b"", (TARGET,))
    data = relay_request(b"d" * 16, ID, message).SerializeToString()
    request = wire.RelayRequest.FromString(data)
    assert (request.database_id, request.member_id) == (b"d" * 16, ID)
    assert relayed_append(request) == message
    with pytest.raises(InvalidRequest):
        relayed_append(wire.RelayRequest(database_id=b"short"))


@pytest.mark.parametrize(
    "request_",
    [
        wire.ProposeRequest(),
        wire.ProposeRequest(vote=wire.VoteRequest(member_id=b"short")),
        wire.ProposeRequest(append=wire.Append(ballot=wire.Ballot(epoch=1, nonce=b"short"))),
    ],
)
def test_refused(request_: wire.ProposeRequest) -> None:
    """A message that the protocol does not have is refused."""
    with pytest.raises(InvalidRequest):
        to_acceptor(request_)


@pytest.mark.parametrize(
    "sections",
    [
        (EpochSection(6, LogEnd(6, 2)),),  # a gap
        (EpochSection(5, LogEnd(4, 2)),),  # nothing in it
        (EpochSection(5, LogEnd(6, 1)),),  # an epoch that goes back
        (EpochSection(5, LogEnd(6, 3)), EpochSection(8, LogEnd(9, 4))),
    ],
)
def test_shape_without_order(sections: tuple[EpochSection, ...]) -> None:
    """A shape whose sections do not follow each other is refused."""
    request = propose_request(Elected(ID, BALLOT, LogShape(BASE, sections)))
    with pytest.raises(InvalidRequest, match="do not follow"):
        to_acceptor(request)


def test_damaged_record() -> None:
    """A record that does not match its checksum is refused."""
    damaged = replace(RECORD, wal_id=5)
    with pytest.raises(BadChecksum):
        to_acceptor(propose_request(Append(BALLOT, (damaged,), 0)))
