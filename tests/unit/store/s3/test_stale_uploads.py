"""Uploads that nobody will complete are aborted by the collector, and by nobody else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shalekv.store.api import Recovered
from shalekv.store.requests import RequestKind
from tests.kit.s3.opening import FOLDER, opened
from tests.kit.s3.scripted_server import Reply, Request, refused, scripted

UPLOAD = (
    """<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>{begun}</Initiated></Upload>"""
)
PAGE = (
    '<?xml version="1.0"?><ListMultipartUploadsResult '
    'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>{more}</IsTruncated>'
    "<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{id}</NextUploadIdMarker>"
    "{uploads}</ListMultipartUploadsResult>"
)


def no_name_is_collected(_name: str) -> bool:
    return False


class Uploads:
    """A server with uploads that were begun some hours ago: key -> hours."""

    def __init__(self, begun: dict[str, float]) -> None:
        self.begun = begun
        self.aborted: list[str] = []

    def answer(self, request: Request) -> Reply:
        """A list shows one upload a page; the time is that of this machine."""
        if request.method == "DELETE":
            self.aborted.append(request.target.partition("?")[0].partition("/bucket/")[2])
            return Reply(204)
        if "uploads" not in request.target:
            return refused(404, "NoSuchKey")
        keys = sorted(self.begun)
        shown = next(
            (k for k in keys if f"key-marker={k.replace('/', '%2F')}" in request.target), ""
        )
        key = next((k for k in keys if k > shown), None)
        if key is None:
            return Reply(200, PAGE.format(more="false", key="", id="", uploads="").encode())
        begun = datetime.now(UTC) - timedelta(hours=self.begun[key])
        told = UPLOAD.format(key=key, id=f"id of {key}", begun=f"{begun:%Y-%m-%dT%H:%M:%S.000Z}")
        more = "true" if key != keys[-1] else "false"
        page = PAGE.format(more=more, key=key, id=f"id of {key}", uploads=told)
        return Reply(200, page.encode())


async def test_old_uploads_go_and_others_stay() -> None:
    """Those of a day ago are aborted, page by page; younger ones and other folders are let be."""
    uploads = Uploads(
        {
            f"{FOLDER}/levels/a": 25,
            f"{FOLDER}/levels/b": 23,
            f"{FOLDER}/levels/c": 99,
            "other/d": 99,
        }
    )
    async with scripted(uploads.answer) as server, opened(server.endpoint) as s3:
        assert await s3.recover(no_name_is_collected) == Recovered(aborted=2)
        assert uploads.aborted == [f"{FOLDER}/levels/a", f"{FOLDER}/levels/c"]
        assert s3.sent.by_kind[RequestKind.LIST] == 4


async def test_they_are_looked_for_seldom() -> None:
    """A collector that comes every minute asks once an hour; who opens a database never does."""
    uploads = Uploads({f"{FOLDER}/levels/a": 25})
    async with scripted(uploads.answer) as server, opened(server.endpoint) as s3:
        assert await s3.recover() == Recovered()
        assert s3.sent.total == 0
        await s3.recover(no_name_is_collected)
        sent = s3.sent.total
        assert await s3.recover(no_name_is_collected) == Recovered()
        assert s3.sent.total == sent


@pytest.mark.parametrize("code", ["AccessDenied", "NotImplemented"])
async def test_a_refusal_is_no_reason_not_to_collect(code: str) -> None:
    """Parts that stay cost money and nothing else."""

    def answer(request: Request) -> Reply:
        if "uploads" in request.target:
            return refused(403 if code == "AccessDenied" else 501, code)
        return refused(404, "NoSuchKey")

    async with scripted(answer) as server, opened(server.endpoint) as s3:
        assert await s3.recover(no_name_is_collected) == Recovered()
