"""How far a scan has come, and with which request it goes on behind that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.v1 import kv_pb2


@dataclass(slots=True)
class ScanPlace:
    """The place of one scan between what its caller has got and what is left."""

    request: kv_pb2.ScanRequest  # as it was begun, without a token
    token: bytes  # of the server: where to go on; empty: at the start
    count: int = 0  # of entries that came
    size_bytes: int = 0  # of their keys and values
    is_looking: bool = False  # all came that was asked for: is there more?
    is_at_end: bool = False
    more: bool = False  # at the end: a limit ended the scan before its range did

    def next_request(self) -> kv_pb2.ScanRequest:
        """What to ask for now.

        A server tells whether there is more when it meets the first entry beyond a limit. If a
        scan breaks off between that and the entry before, one more entry is asked for.
        """
        request = kv_pb2.ScanRequest(page_token=self.token)
        request.MergeFrom(self.request)
        limit, limit_bytes = self.request.limit, self.request.limit_bytes
        is_full = bool(limit and self.count >= limit)
        self.is_looking = is_full or bool(limit_bytes and self.size_bytes >= limit_bytes)
        if self.is_looking:
            request.limit, request.limit_bytes = 1, 0
        else:
            request.limit = limit and limit - self.count
            request.limit_bytes = limit_bytes and limit_bytes - self.size_bytes
        return request

    def take(self, reply: kv_pb2.ScanReply) -> list[kv_pb2.Entry]:
        """The entries of a message that the caller gets."""
        if self.is_looking:
            self.is_at_end = True
            self.more = bool(reply.entries)
            return []
        entries = list(reply.entries)
        self.count += len(entries)
        self.size_bytes += sum(len(each.key) + len(each.value) for each in entries)
        self.more = reply.more
        if self.request.resumable:
            self.is_at_end = reply.more or not reply.page_token
        self.token = reply.page_token
        return entries

    @property
    def can_resume(self) -> bool:
        """Whether the scan can go on behind the last message after its call has broken off."""
        return self.request.resumable and bool(self.token)
