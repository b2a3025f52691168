"""The messages of the quorum WAL as protobuf: values of `protocol` to the wire, and back.

`LogMark` on the wire is `LogEnd`. Decoding checks what one message shows: the lengths of ids, the
order of sections, and the checksum of each record. Raises `InvalidRequest` and `BadChecksum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from shalekv.errors import InvalidRequest
from shalekv.format.wal_record import check_record
from shalekv.protocol.membership import MEMBER_ID_BYTES
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Archived,
    Ballot,
    Elected,
    EpochSection,
    Greet,
    Greeting,
    Joined,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    Refusal,
    RelayTarget,
    ToAcceptor,
    ToProposer,
    Vote,
    VoteRequest,
)
from shalekv.v1 import safekeeper_pb2 as wire

_NONCE_BYTES = 16
_HEALTH = {
    LogHealth.SOUND: wire.LOG_HEALTH_SOUND,
    LogHealth.DAMAGED: wire.LOG_HEALTH_DAMAGED,
    LogHealth.REFILLING: wire.LOG_HEALTH_REFILLING,
}
_HEALTH_OF: Mapping[int, LogHealth] = {number: health for health, number in _HEALTH.items()}


def check_id(value: bytes, field: str) -> bytes:
    """Return `value` if it is an id of 16 bytes. Raises `InvalidRequest`."""
    if len(value) != MEMBER_ID_BYTES:
        problem = f"{len(value)} bytes, and an id has {MEMBER_ID_BYTES}"
        raise InvalidRequest(field, problem)
    return value


def propose_request(message: ToAcceptor) -> wire.ProposeRequest:
    """Encode a message of a writer."""
    match message:
        case Append():
            return wire.ProposeRequest(append=_append_message(message))
        case Greet():
            return wire.ProposeRequest(greet=wire.Greet())
        case VoteRequest():
            ballot = ballot_message(message.ballot)
            vote = wire.VoteRequest(member_id=message.member_id, ballot=ballot)
            return wire.ProposeRequest(vote=vote)
        case Elected():
            elected = wire.Elected(
                member_id=message.member_id,
                ballot=ballot_message(message.ballot),
                log=shape_message(message.log),
            )
            return wire.ProposeRequest(elected=elected)


def to_acceptor(request: wire.ProposeRequest) -> ToAcceptor:
    """Decode a message of a writer."""
    match request.WhichOneof("message"):
        case "append":
            return _append_of(request.append)
        case "greet":
            return Greet()
        case "vote":
            vote = request.vote
            return VoteRequest(
                check_id(vote.member_id, "vote.member_id"), _ballot_of(vote.ballot, "vote.ballot")
            )
        case "elected":
            elected = request.elected
            return Elected(
                check_id(elected.member_id, "elected.member_id"),
                _ballot_of(elected.ballot, "elected.ballot"),
                _shape_of(elected.log, "elected.log"),
            )
        case _:
            raise InvalidRequest("message", "none is set, or one of a later version")


def propose_reply(message: ToProposer) -> wire.ProposeReply:
    """Encode a message of a member."""
    match message:
        case Appended():
            appended = wire.Appended(
                ballot=ballot_message(message.ballot),
                flushed_lsn=message.flushed_lsn,
                archived_wal_id=message.archived_wal_id,
                is_full=message.is_full,
            )
            return wire.ProposeReply(appended=appended)
        case Greeting():
            return wire.ProposeReply(greeting=_greeting_message(message))
        case Vote():
            vote = wire.Vote(
                ballot=ballot_message(message.ballot),
                log=shape_message(message.log),
                committed_lsn=message.committed_lsn,
            )
            return wire.ProposeReply(vote=vote)
        case Joined():
            joined = wire.Joined(ballot=ballot_message(message.ballot), last_lsn=message.last_lsn)
            return wire.ProposeReply(joined=joined)
        case Archived():
            archived = wire.Archived(ballot=ballot_message(message.ballot), wal_id=message.wal_id)
            return wire.ProposeReply(archived=archived)
        case Refusal():
            refusal = wire.Refusal(promise=ballot_message(message.promise), problem=message.problem)
            return wire.ProposeReply(refusal=refusal)


def to_proposer(reply: wire.ProposeReply) -> ToProposer:
    """Decode a message of a member."""
    match reply.WhichOneof("message"):
        case "appended":
            return _appended_of(reply.appended)
        case "greeting":
            return _greeting_of(reply.greeting)
        case "vote":
            vote = reply.vote
            ballot = _ballot_of(vote.ballot, "vote.ballot")
            return Vote(ballot, _shape_of(vote.log, "vote.log"), vote.committed_lsn)
        case "joined":
            joined = reply.joined
            return Joined(_ballot_of(joined.ballot, "joined.ballot"), joined.last_lsn)
        case "archived":
            archived = reply.archived
            return Archived(_ballot_of(archived.ballot, "archived.ballot"), archived.wal_id)
        case "refusal":
            promise = _ballot_of(reply.refusal.promise, "refusal.promise")
            return Refusal(promise, reply.refusal.problem)
        case _:
            raise InvalidRequest("message", "none is set, or one of a later version")


def relay_request(database_id: bytes, member_id: bytes, message: Append) -> wire.RelayRequest:
    """Encode an append that a member relays to another one."""
    append = _append_message(message)
    return wire.RelayRequest(database_id=database_id, member_id=member_id, append=append)


def relayed_append(request: wire.RelayRequest) -> Append:
    """Decode an append that another member has relayed."""
    check_id(request.database_id, "database_id")
    check_id(request.member_id, "member_id")
    return _append_of(request.append)


def record_messages(records: Iterable[Record]) -> Iterator[wire.LogRecord]:
    """Encode records."""
    for record in records:
        yield wire.LogRecord(
            lsn=record.lsn,
            epoch=record.epoch,
            wal_id=record.wal_id,
            ends_object=record.ends_object,
            previous_checksum=record.previous_checksum,
            checksum=record.checksum,
            payload=record.payload,
        )


def records_of(messages: Iterable[wire.LogRecord], name: str) -> tuple[Record, ...]:
    """Decode records that `name` has sent, and verify their checksums. Raises `BadChecksum`."""
    return tuple(
        check_record(
            Record(
                message.lsn,
                message.epoch,
                message.wal_id,
                message.ends_object,
                message.previous_checksum,
                message.checksum,
                message.payload,
            ),
            name,
        )
        for message in messages
    )


def ballot_message(ballot: Ballot) -> wire.Ballot:
    """Encode a ballot."""
    return wire.Ballot(epoch=ballot.epoch, nonce=ballot.nonce)


def shape_message(log: LogShape) -> wire.LogShape:
    """Encode the shape of a log."""
    sections = (
        wire.LogSection(first_lsn=section.first_lsn, last=_log_end_message(section.last))
        for section in log.sections
    )
    return wire.LogShape(base=_log_end_message(log.base), sections=sections)


def health_value(health: LogHealth) -> wire.LogHealth.ValueType:
    """Encode the health of a log."""
    return _HEALTH[health]


def status_ballot(ballot: wire.Ballot) -> Ballot:
    """Decode the promise in a status."""
    return _ballot_of(ballot, "promise")


def status_shape(log: wire.LogShape) -> LogShape:
    """Decode the shape of the log in a status."""
    return _shape_of(log, "log")


def health_of(value: int) -> LogHealth:
    """Decode the health of a log. Raises `InvalidRequest`."""
    if value not in _HEALTH_OF:
        raise InvalidRequest("health", f"{value} is unknown")
    return _HEALTH_OF[value]


def _append_message(message: Append) -> wire.Append:
    return wire.Append(
        ballot=ballot_message(message.ballot),
        records=record_messages(message.records),
        committed_lsn=message.committed_lsn,
        archiver_id=message.archiver_id,
        relays=_target_messages(message.relays),
        commit_peers=_target_messages(message.commit_peers),
    )


def _append_of(append: wire.Append) -> Append:
    return Append(
        _ballot_of(append.ballot, "append.ballot"),
        records_of(append.records, "an append"),
        append.committed_lsn,
        append.archiver_id,
        _targets_of(append.relays),
        _targets_of(append.commit_peers),
    )


def _target_messages(targets: Iterable[RelayTarget]) -> list[wire.RelayTarget]:
    return [wire.RelayTarget(member_id=each.member_id, address=each.address) for each in targets]


def _targets_of(targets: Iterable[wire.RelayTarget]) -> tuple[RelayTarget, ...]:
    return tuple(
        RelayTarget(check_id(each.member_id, "append.member_id"), each.address) for each in targets
    )


def _appended_of(appended: wire.Appended) -> Appended:
    archived = appended.archived_wal_id if appended.HasField("archived_wal_id") else None
    ballot = _ballot_of(appended.ballot, "appended.ballot")
    return Appended(ballot, appended.flushed_lsn, archived, appended.is_full)


def _greeting_message(greeting: Greeting) -> wire.Greeting:
    return wire.Greeting(
        member_id=greeting.member_id,
        promise=ballot_message(greeting.promise),
        log=shape_message(greeting.log),
        committed_lsn=greeting.committed_lsn,
        health=_HEALTH[greeting.health],
    )


def _greeting_of(greeting: wire.Greeting) -> Greeting:
    return Greeting(
        check_id(greeting.member_id, "greeting.member_id"),
        _ballot_of(greeting.promise, "greeting.promise"),
        _shape_of(greeting.log, "greeting.log"),
        greeting.committed_lsn,
        health_of(greeting.health),
    )


def _ballot_of(ballot: wire.Ballot, field: str) -> Ballot:
    if len(ballot.nonce) != _NONCE_BYTES:
        problem = f"{len(ballot.nonce)} bytes, and a nonce has {_NONCE_BYTES}"
        raise InvalidRequest(f"{field}.nonce", problem)
    return Ballot(ballot.epoch, ballot.nonce)


def _log_end_message(mark: LogEnd) -> wire.LogMark:
    return wire.LogMark(
        lsn=mark.lsn,
        epoch=mark.epoch,
        checksum=mark.checksum,
        wal_id=mark.wal_id,
        ends_object=mark.ends_object,
    )


def _log_end_of(mark: wire.LogMark) -> LogEnd:
    wal_id = mark.wal_id if mark.HasField("wal_id") else None
    return LogEnd(mark.lsn, mark.epoch, mark.checksum, wal_id, mark.ends_object)


def _shape_of(log: wire.LogShape, field: str) -> LogShape:
    sections = tuple(EpochSection(each.first_lsn, _log_end_of(each.last)) for each in log.sections)
    shape = LogShape(_log_end_of(log.base), sections)
    _check_sections(shape.base, sections, field)
    return shape


def _check_sections(base: LogEnd, sections: Sequence[EpochSection], field: str) -> None:
    """Raise `InvalidRequest` unless each section follows the one before, the first `base`."""
    lasts = [base, *(section.last for section in sections)]
    for (before, last), section in zip(pairwise(lasts), sections, strict=True):
        is_next = section.first_lsn == before.lsn + 1 and last.lsn >= section.first_lsn
        if not is_next or last.epoch < before.epoch:
            problem = f"records {section.first_lsn} to {last.lsn} do not follow {before.lsn}"
            raise InvalidRequest(f"{field}.sections", problem)
