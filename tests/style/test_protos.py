"""The conventions of the protos that `buf lint` can't check."""

from __future__ import annotations

import re

from google.protobuf.descriptor import ServiceDescriptor

from shalekv.cli.console.settings_flags import settings_of
from shalekv.settings import AnyConfig
from shalekv.v1 import admin_pb2, kv_pb2
from tests.style.sources import ROOT

_SETTING = re.compile(r"`(\w+)` \(server setting\)|server setting `(\w+)`")


def services() -> list[ServiceDescriptor]:
    files = (kv_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    return [s for file in files for s in file.services_by_name.values()]


def test_requests_and_replies_are_named_after_their_rpc() -> None:
    """Rpc X takes XRequest and answers XReply."""
    named = {m.name: (m.input_type.name, m.output_type.name) for s in services() for m in s.methods}
    assert named == {name: (f"{name}Request", f"{name}Reply") for name in named}


def test_unary_messages_have_headers() -> None:
    """Every unary request has a RequestHeader, and every unary reply a ReplyHeader, as field 1."""
    unary = [
        m
        for s in services()
        for m in s.methods
        if not m.client_streaming and not m.server_streaming
    ]
    headers = {m.name: (m.input_type.fields[0], m.output_type.fields[0]) for m in unary}
    wrong = [
        name
        for name, pair in headers.items()
        if [(f.name, f.number, f.message_type and f.message_type.name) for f in pair]
        != [("header", 1, "RequestHeader"), ("header", 1, "ReplyHeader")]
    ]
    assert wrong == []


def test_comments_name_settings_that_exist() -> None:
    """Each server setting that a comment names is one."""
    protos = [path.read_text() for path in (ROOT / "protos/shalekv/v1").glob("*.proto")]
    comments = re.sub(r"\n\s*//", "", "".join(protos))
    named = {name for pair in _SETTING.findall(comments) for name in pair if name}
    assert "value_bytes_max" in named
    assert named - {setting.name for setting in settings_of(AnyConfig)} == set()
