"""Names of objects, tokens, URLs and settings that are text, and what the command line reads."""

from __future__ import annotations

import gzip
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from click import BadParameter

from shalekv.cli.commands.role import parse_rule
from shalekv.cli.commands.txn import NotationError, parse_compares, parse_operations, parse_script
from shalekv.cli.console.keys import Encoding
from shalekv.cli.load.batches import BatchLimits, RowBatch
from shalekv.cli.load.formats import FileFormat
from shalekv.cli.load.ledger import LoadState, StateMismatch, read_state, write_state
from shalekv.cli.load.lines import BadInput
from shalekv.cli.load.source import InputOptions, InputSource, read_batches
from shalekv.cli.process.process_reports import parse_report, report_line
from shalekv.errors import InvalidRequest, InvalidSetting, InvalidUrl, PageExpired
from shalekv.format.backup import (
    BackupMark,
    LevelCopy,
    MarkPurpose,
    WalCopy,
    backup_name,
    is_backup_id,
    new_backup_id,
    parse_backup_name,
    parse_copy,
    parse_mark,
)
from shalekv.format.names import (
    TemporaryName,
    election_name,
    level_name,
    manifest_name,
    parse_election_name,
    parse_level_name,
    parse_manifest_name,
    parse_policy_name,
    parse_temporary_name,
    parse_wal_name,
    policy_name,
    wal_name,
)
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.membership import Member
from shalekv.server.election.elector import parse_place
from shalekv.server.requests import PageSeal, PageToken
from shalekv.store.api import RequestKind
from shalekv.store.disk_cache_folder import CachedPart, decode_part, encode_part
from shalekv.store.url import parse_url
from shalekv.telemetry.histogram import Histogram
from shalekv.telemetry.metrics import Metrics, decode_metrics
from shalekv.v1 import kv_pb2
from shalekv_client import SessionToken
from shalekv_client.changes import to_message
from shalekv_client.routing.tokens import InvalidToken
from shalekv_wire.trace_context import parse_traceparent
from tests.fuzz.decoders.decoder import Decoder
from tests.kit.samples import DATABASE_ID, SST_ID

KEYS = KeyRange(b"a", b"q")
SNAPSHOT_ID = b"id of a snapshot"
LIMITS = BatchLimits(count_max=4, bytes_max=64)
NOW_MS = 1_700_000_000_000
PART = CachedPart(DATABASE_ID, SST_ID, 4096, 11)
BACKUP_ID = new_backup_id(1_769_832_000_123, b"rand")
METRICS = Metrics()
METRICS.add("child_starts", 3, "compactor")
METRICS.add_histogram("commit_group_commits", Histogram())
STATE = LoadState("0" * 32, {"path": "a.tsv"}, "d" * 32, line=7, offset_bytes=99, rows=6)


def _report(line: bytes) -> object:
    sent, metrics = parse_report(line)
    return sent, metrics.rows()


def text_of(data: bytes) -> str:
    """Return any bytes as the text of a name."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _named(parse: Callable[[str], object], *samples: str) -> Decoder:
    return Decoder(
        name=parse.__name__,
        covers=(parse,),
        decode=lambda data: parse(text_of(data)),
        samples=[sample.encode() for sample in samples],
        errors=(),
        refused=None,
    )


NAMES = (
    _named(parse_manifest_name, manifest_name(0), manifest_name(2**64 - 1)),
    _named(parse_wal_name, wal_name(7), wal_name(2**64 - 1)),
    _named(parse_election_name, election_name(7)),
    _named(parse_policy_name, policy_name(7)),
    _named(parse_level_name, level_name(SST_ID)),
    _named(parse_temporary_name, str(TemporaryName(wal_name(7), SST_ID, 0xC0FFEE))),
    _named(parse_backup_name, backup_name(BACKUP_ID)),
    _named(parse_mark, str(BackupMark(BACKUP_ID, MarkPurpose.CREATION, BACKUP_ID))),
    _named(parse_copy, str(LevelCopy(SST_ID, 0xC0FFEE)), str(WalCopy(7, b"identifies bytes", 1))),
    Decoder(
        name="id of a backup",
        covers=(is_backup_id,),
        decode=lambda data: is_backup_id(text_of(data)),
        samples=[BACKUP_ID.encode()],
        errors=(),
        refused=False,
    ),
)


def _page_token(
    name: str, view: int | None, seal: PageSeal, request: kv_pb2.ScanRequest
) -> Decoder:
    """Tokens of the scan of a view, or of a snapshot."""

    def decode(data: bytes) -> PageToken:
        going_on = kv_pb2.ScanRequest(page_token=data)
        going_on.MergeFrom(request)
        return seal.decode(going_on)

    return Decoder(
        name=f"page token {name}",
        covers=(PageSeal.decode,),
        decode=decode,
        samples=[seal.encode(PageToken(view, b"last key"), request)],
        errors=(InvalidRequest, PageExpired),
        is_sealed=True,
        reseal=lambda data: seal.seal(data[16:], request) + data[16:],
    )


PAGE_TOKENS = (
    _page_token("of a view", 7, PageSeal(DATABASE_ID, "", b"", KEYS), kv_pb2.ScanRequest()),
    _page_token(
        "at a snapshot",
        None,
        PageSeal(DATABASE_ID, "token:alice", b"secret", KEYS),
        kv_pb2.ScanRequest(header=kv_pb2.RequestHeader(snapshot_id=SNAPSHOT_ID)),
    ),
)


def _lines(data: bytes) -> list[tuple[str, str]]:
    return [(f"line {n}", line) for n, line in enumerate(text_of(data).split("\n"))]


def _script(data: bytes) -> object:
    return parse_script(text_of(data), Encoding.ESCAPED)


def _compares(data: bytes) -> object:
    return [*parse_compares(_lines(data), Encoding.ESCAPED)]


def _operations(data: bytes) -> object:
    return [*parse_operations(_lines(data), Encoding.ESCAPED)]


def _state(data: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_state(Path(file.name), STATE.origin)


def pairs_of(data: bytes, file_format: FileFormat | None) -> list[RowBatch]:
    """Return the input of `load`, as far as the messages that it would send."""
    reading = InputOptions(file_format)
    source = InputSource(io.BytesIO(data))
    found = [*read_batches(source, reading, LIMITS, now_ms=lambda: NOW_MS, stop_at_bad_row=False)]
    for batch in found:
        for put in batch.puts:
            to_message(put)
        for bad in batch.bad:
            str(bad)
    return found


def _dump(file_format: FileFormat, *samples: bytes, found: Sequence[bytes] = ()) -> Decoder:
    return Decoder(
        name=f"rows of {file_format.value}",
        covers=(read_batches,),
        decode=lambda data: pairs_of(data, file_format),
        samples=samples,
        errors=(BadInput,),
        found=found,
    )


def _text(
    name: str, parse: Callable[[str], object], error: type[Exception], *samples: str
) -> Decoder:
    return Decoder(
        name=name,
        covers=(parse,),
        decode=lambda data: parse(text_of(data)),
        samples=[sample.encode() for sample in samples],
        errors=(error,),
    )


SCRIPT = b"""# both keys are as they were
exists a
seq b = 17
value c < "x y"
empty --prefix user/

put a "1 2" --ttl 5m
add counter -3
delete --start a --end b

get b
"""
NDJSON = (
    b'{"key": "a", "value": "1", "expire_at_ms": 1800000000000}\n'
    b'{"key_hex": "00ff", "value_base64": "AAE="}\n\n{"key": 1.50, "value": [1, {"b": null}]}\n'
)


CSV_HEX = b"key_hex,value\n00ff,v\n"


def _state_bytes(state: LoadState) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        write_state(path, state)
        return path.read_bytes()


PARTS = [part.strip() for part in SCRIPT.split(b"\n\n")]
TOKEN = str(SessionToken(DATABASE_ID, 17))


def _part(
    name: str, cover: Callable[..., object], decode: Callable[[bytes], object], *samples: bytes
) -> Decoder:
    """A part of a transaction, or all of it."""
    return Decoder(
        name=name,
        covers=(cover,),
        decode=decode,
        samples=samples,
        errors=(NotationError,),
        found=[b"\x0b", b"exists a\n\x0b\n\n\xa0"],
    )


DECODERS = (
    *PAGE_TOKENS,
    Decoder(
        name="part of the cache on disk",
        covers=(decode_part,),
        decode=lambda data: decode_part(PART, data),
        samples=[encode_part(PART, b"eleven here")],
        errors=(),
        refused=None,
        is_sealed=True,
    ),
    _dump(FileFormat.TSV, b"key\tvalue\n\xef\xbb\xbfk\t\r\n", b"a\tb"),
    _dump(
        FileFormat.CSV,
        b'key,value,x\n"a,""b""\nc",v,1\r\n',
        CSV_HEX,
        found=[b"key\rfoo,value\na,b\n"],
    ),
    _dump(
        FileFormat.NDJSON,
        NDJSON,
        found=[
            b'{"key":"a","value":"b","expire_at_ms":1' + b"0" * 40 + b"}",
            b"[" * 100_000,
            b'{"key":' + b"1" * 5_000 + b"}",
        ],
    ),
    Decoder(
        name="rows of a file without a name",
        covers=(read_batches,),
        decode=lambda data: pairs_of(data, None),
        samples=[gzip.compress(NDJSON, mtime=0), NDJSON, b"a\tb\n"],
        errors=(BadInput,),
        is_compressed=True,
    ),
    Decoder(
        name="state of a load",
        covers=(read_state,),
        decode=_state,
        samples=[_state_bytes(STATE)],
        found=[
            b"[" * 100_000,
            _state_bytes(STATE).replace(b"99", b'"x"'),
            _state_bytes(replace(STATE, origin={})).replace(b"{}", b"[]"),
        ],
        errors=(StateMismatch,),
    ),
    Decoder(
        name="report of a child process",
        covers=(parse_report,),
        decode=_report,
        samples=[report_line(dict.fromkeys(RequestKind, 2**53), METRICS)],
        errors=(ValueError,),
    ),
    Decoder(
        name="metrics of another process",
        covers=(decode_metrics,),
        decode=lambda data: decode_metrics(data).rows(),
        samples=[METRICS.encode()],
        found=[
            b"[" * 100_000,
            b'[["commits",[],1' + b"0" * 400 + b"]]",
            b'[["snapshots",[],NaN]]',
            b'[["commit_group_commits",[],[1' + b"0" * 400 + b",[1]]]]",
        ],
        errors=(ValueError,),
    ),
    _text("URL", parse_url, InvalidUrl, "s3://bucket/a%20b", "file:///var/lib", "memory://x"),
    _text("place of an election", parse_place, InvalidSetting, "bucket", "etcds://a:1,[::1]:2/key"),
    Decoder(
        name="name of a span",
        covers=(parse_traceparent,),
        decode=lambda data: parse_traceparent(text_of(data)),
        samples=[
            f"00-{'0f' * 16}-{'0f' * 8}-01".encode(),
            f"01-{'0f' * 16}-{'0f' * 8}-00-x".encode(),
        ],
        errors=(),
    ),
    _text("session token", SessionToken.parse, InvalidToken, TOKEN),
    _text("member", Member.parse, ValueError, f"{'0f' * 16}@keeper:7655"),
    Decoder(
        name="rule of a role",
        covers=(parse_rule,),
        decode=lambda data: parse_rule(text_of(data), Encoding.ESCAPED),
        samples=[b"read,write:start=a\\x2c,end=b", b"watch:prefix=orders/", b"admin"],
        errors=(BadParameter,),
    ),
    _part("transaction", parse_script, _script, SCRIPT),
    _part("comparisons", parse_compares, _compares, PARTS[0].split(b"\n", 1)[1]),
    _part("operations", parse_operations, _operations, *PARTS[1:]),
)
