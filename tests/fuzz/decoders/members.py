"""Stored files of safekeepers, and their messages to and from a writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import DecodeError, Message

from shalekv.errors import CorruptObject, InvalidRequest
from shalekv.format.coding import crc32c
from shalekv.format.quorum.member_files import (
    Control,
    MemberIdentity,
    SegmentHead,
    Synced,
    decode_control,
    decode_head,
    decode_synced,
    encode_control,
    encode_head,
    encode_synced,
)
from shalekv.format.quorum.messages import (
    ballot_message,
    health_of,
    propose_reply,
    propose_request,
    record_messages,
    records_of,
    relay_request,
    relayed_append,
    shape_message,
    status_ballot,
    status_shape,
    to_acceptor,
    to_proposer,
)
from shalekv.format.wal_record import HEADER_BYTES, check_record, decode_record, encode_record
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Archived,
    Elected,
    Greet,
    Greeting,
    Joined,
    LogHealth,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.v1 import safekeeper_pb2 as wire
from tests.fuzz.decoders.decoder import Decoder
from tests.kit.quorum.messages import BALLOT, BASE, BOUNDARY, ID, RECORD, SHAPE, TARGET

FILE = "/data/member/a file"
URL = "s3://bucket/" + "päth" * 40

TO_ACCEPTOR = (
    Greet(),
    VoteRequest(ID, BALLOT),
    Elected(ID, BALLOT, SHAPE),
    Append(BALLOT, (RECORD, BOUNDARY), 5, ID, (TARGET, TARGET), (TARGET,)),
)
TO_PROPOSER = (
    Greeting(ID, BALLOT, SHAPE, 5, LogHealth.REFILLING),
    Vote(BALLOT, SHAPE, 5),
    Joined(BALLOT, 9),
    Appended(BALLOT, 9, 3, is_full=True),
    Archived(BALLOT, 3),
    Refusal(BALLOT, "a later one"),
)


def _resealed_slot(data: bytes) -> bytes:
    """A slot or head that ends with its checksum."""
    return data[:-4] + crc32c(data[:-4]).to_bytes(4, "little")


def _resealed_record(data: bytes) -> bytes:
    """A frame whose length and checksum fit what is there."""
    if len(data) < HEADER_BYTES:
        return data
    payload = data[HEADER_BYTES:]
    header = data[:4] + len(payload).to_bytes(4, "little") + data[8 : HEADER_BYTES - 4]
    return header + crc32c(payload, crc32c(header)).to_bytes(4, "little") + payload


def _control(url: str) -> bytes:
    return encode_control(Control(MemberIdentity(ID, ID, url, ID), BALLOT, base=BASE))


def _record(data: bytes) -> object:
    found = decode_record(FILE, data)
    assert check_record(found.record, FILE) == found.record
    return found.record


def _wire(make: Callable[[], Message], read: Callable[[object], object]) -> Callable[..., object]:
    """Bytes as gRPC takes them apart, and then as we do."""

    def decode(data: bytes) -> object:
        message = make()
        message.ParseFromString(data)
        return read(message)

    return decode


def _message(
    name: str,
    covers: tuple[Callable[..., object], ...],
    make: Callable[[], Message],
    samples: list[Message],
) -> Decoder:
    def read(message: object) -> object:
        return [cover(message) for cover in covers]

    return Decoder(
        name=name,
        covers=covers,
        decode=_wire(make, read),
        samples=[sample.SerializeToString() for sample in samples],
        errors=(DecodeError, InvalidRequest, CorruptObject),
    )


def _shape(data: bytes) -> object:
    message = wire.LogShape()
    message.ParseFromString(data)
    shape = status_shape(message)
    ends = [shape.base, *(section.last for section in shape.sections)]
    for before, section in zip(ends, shape.sections, strict=False):
        assert section.first_lsn == before.lsn + 1, "a gap"
        assert before.epoch <= section.epoch, "an epoch goes down"
    return shape


def _records(data: bytes) -> object:
    message = wire.Append()
    message.ParseFromString(data)
    return records_of(message.records, "a peer")


DECODERS = (
    Decoder(
        name="control",
        covers=(decode_control,),
        decode=lambda data: decode_control(FILE, data),
        samples=[_control(url) for url in ("memory://a", URL)],
        found=[_resealed_slot(_control(URL)[:136] + b"\xff" + _control(URL)[137:])],  # of the URL
        is_sealed=True,
        reseal=_resealed_slot,
    ),
    Decoder(
        name="synced",
        covers=(decode_synced,),
        decode=lambda data: decode_synced(FILE, data),
        samples=[encode_synced(Synced(1, 2, 3, 4, 5))],
        is_sealed=True,
        reseal=_resealed_slot,
    ),
    Decoder(
        name="head of a segment",
        covers=(decode_head,),
        decode=lambda data: decode_head(FILE, data),
        samples=[encode_head(SegmentHead(ID, 1, 2))],
        is_sealed=True,
        reseal=_resealed_slot,
    ),
    Decoder(
        name="record of the quorum WAL",
        covers=(decode_record, check_record),
        decode=_record,
        samples=[*map(encode_record, (RECORD, BOUNDARY))],
        is_sealed=True,
        reseal=_resealed_record,
    ),
    _message(
        "what a writer says",
        (to_acceptor,),
        wire.ProposeRequest,
        [propose_request(message) for message in TO_ACCEPTOR],
    ),
    _message(
        "what a member says",
        (to_proposer,),
        wire.ProposeReply,
        [propose_reply(message) for message in TO_PROPOSER],
    ),
    _message(
        "what a member passes on",
        (relayed_append,),
        wire.RelayRequest,
        [relay_request(ID, ID, message) for message in TO_ACCEPTOR if isinstance(message, Append)],
    ),
    _message("ballot", (status_ballot,), wire.Ballot, [ballot_message(BALLOT)]),
    Decoder(
        name="shape of a log",
        covers=(status_shape,),
        decode=_shape,
        samples=[shape_message(SHAPE).SerializeToString()],
        errors=(DecodeError, InvalidRequest),
        found=[
            shape_message(replace(SHAPE, sections=SHAPE.sections[::-1])).SerializeToString(),
            shape_message(replace(SHAPE, sections=SHAPE.sections[1:])).SerializeToString(),
        ],
    ),
    Decoder(
        name="records that were sent",
        covers=(records_of,),
        decode=_records,
        samples=[wire.Append(records=record_messages((RECORD, BOUNDARY))).SerializeToString()],
        errors=(DecodeError, CorruptObject),
    ),
    Decoder(
        name="health",
        covers=(health_of,),
        decode=lambda data: health_of(int.from_bytes(data, "little", signed=True)),
        samples=[b"\1", b"\2", b"\3"],
        errors=(InvalidRequest,),
    ),
)
