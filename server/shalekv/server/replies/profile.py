"""The reply to `Admin.Profile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shalekv.errors import InvalidRequest
from shalekv.telemetry.profile import OtherProcesses, ProfileFormat, take_profile
from shalekv.v1 import admin_pb2, kv_pb2

_FORMATS: Mapping[int, ProfileFormat] = MappingProxyType(
    {
        admin_pb2.PROFILE_FORMAT_UNSPECIFIED: ProfileFormat.TEXT,
        admin_pb2.PROFILE_FORMAT_TEXT: ProfileFormat.TEXT,
        admin_pb2.PROFILE_FORMAT_HTML: ProfileFormat.HTML,
        admin_pb2.PROFILE_FORMAT_SPEEDSCOPE: ProfileFormat.SPEEDSCOPE,
    }
)


async def profile_reply(
    request: admin_pb2.ProfileRequest,
    header: Callable[[], kv_pb2.ReplyHeader],
    others: OtherProcesses | None = None,
) -> admin_pb2.ProfileReply:
    """Take the profile. Raises `InvalidRequest`, and as `take_profile`."""
    form = _FORMATS.get(request.format)
    if form is None:
        raise InvalidRequest("format", f"there is no format {request.format}")
    profile = await take_profile(request.duration_ms, form, others)
    return admin_pb2.ProfileReply(
        header=header(),
        profile=profile.text,
        samples=profile.samples,
        missing_processes=profile.missing,
    )
