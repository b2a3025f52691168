"""A front end of fake-gcs-server: `google_program.py URL` listens, and prints its port.

fake-gcs-server has conditional uploads and paged lists in Google's JSON API alone, and obstore
speaks the XML API. So these two requests are translated to JSON, and their replies to XML; all
others are passed on. fake-gcs-server decides who wins a race, and what a list shows.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from aiohttp import ClientSession, web

PAGE_NAMES = 1_000
MAX_BODY_BYTES = 256 * 1024 * 1024
INNER_URL = web.AppKey("inner_url", str)
SESSION = web.AppKey("session", ClientSession)
CODES = {412: "PreconditionFailed", 404: "NoSuchKey"}
META = "x-goog-meta-"
PASSED_ON = ("range", "if-match", "if-none-match")
NOT_PASSED_BACK = frozenset({"transfer-encoding", "connection", "date", "server"})


async def answer(request: web.Request) -> web.StreamResponse:
    path = request.raw_path.partition("?")[0]
    bucket, _, name = (unquote(part) for part in path.removeprefix("/").partition("/"))
    if request.method == "PUT" and name:
        return await upload(request, bucket, name)
    if request.method == "GET" and not name:
        return await list_page(request, bucket)
    return await pass_on(request, bucket, name)


async def upload(request: web.Request, bucket: str, name: str) -> web.Response:
    query = {"uploadType": "media", "name": name}
    if (generation := request.headers.get("x-goog-if-generation-match")) is not None:
        query["ifGenerationMatch"] = generation
    headers = {
        key: text
        for key, text in request.headers.items()
        if key.lower().startswith(META) or key.lower() == "content-type"
    }
    url = f"{request.app[INNER_URL]}/upload/storage/v1/b/{quote(bucket)}/o"
    body = await request.read()
    session = request.app[SESSION]
    async with session.post(url, params=query, headers=headers, data=body) as reply:
        if reply.status != 200:
            return await refusal(request, bucket, reply.status)
        made = await reply.json()
    found = {"etag": f'"{made["etag"]}"', "x-goog-generation": str(made["generation"])}
    return web.Response(headers=found)


async def list_page(request: web.Request, bucket: str) -> web.Response:
    asked = request.query
    query = {"prefix": asked.get("prefix", ""), "maxResults": str(PAGE_NAMES)}
    if "start-after" in asked:
        query["startOffset"] = asked["start-after"] + "\0"  # it is inclusive
    if "continuation-token" in asked:
        query["pageToken"] = asked["continuation-token"]
    url = f"{request.app[INNER_URL]}/storage/v1/b/{quote(bucket)}/o"
    async with request.app[SESSION].get(url, params=query) as reply:
        if reply.status != 200:
            return await refusal(request, bucket, reply.status)
        page = await reply.json()
    return web.Response(text=list_result(page), content_type="application/xml")


def list_result(page: dict[str, Any]) -> str:
    token = page.get("nextPageToken", "")
    return "".join(
        [
            f"<ListBucketResult><IsTruncated>{str(bool(token)).lower()}</IsTruncated>",
            f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else "",
            *(
                f"<Contents><Key>{escape(item['name'])}</Key><Size>{item['size']}</Size>"
                f"<LastModified>{item['updated']}</LastModified>"
                f"<ETag>&quot;{escape(item['etag'])}&quot;</ETag></Contents>"
                for item in page.get("items", [])
            ),
            "</ListBucketResult>",
        ]
    )


async def pass_on(request: web.Request, bucket: str, name: str) -> web.Response:
    url = f"{request.app[INNER_URL]}/{quote(bucket)}/{quote(name, safe='')}"
    headers = {key: request.headers[key] for key in PASSED_ON if key in request.headers}
    session = request.app[SESSION]
    async with session.request(request.method, url, headers=headers) as reply:
        if reply.status == 404:
            return await refusal(request, bucket, reply.status)
        found = {
            key: text for key, text in reply.headers.items() if key.lower() not in NOT_PASSED_BACK
        }
        return web.Response(status=reply.status, headers=found, body=await reply.read())


async def refusal(request: web.Request, bucket: str, status: int) -> web.Response:
    code = CODES.get(status, "InternalError")
    if status == 404:
        url = f"{request.app[INNER_URL]}/storage/v1/b/{quote(bucket)}"
        async with request.app[SESSION].get(url) as reply:
            code = code if reply.status == 200 else "NoSuchBucket"
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


async def session_of(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(auto_decompress=False) as session:
        app[SESSION] = session
        yield


async def main(inner_url: str) -> None:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[INNER_URL] = inner_url
    app.cleanup_ctx.append(session_of)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"listens on {runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
