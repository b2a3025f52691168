"""Which databases a node takes: those at or below its own URL, where it archives to."""

from __future__ import annotations

from shalekv.errors import InvalidUrl
from shalekv.store.url import BucketUrl, FileUrl, MemoryUrl, parse_url


def check_place(url: str, node_url: str) -> str:
    """`url`, if it is at or below that of the node. Raises `InvalidUrl`."""
    if not _is_at_or_below(url, node_url):
        raise InvalidUrl(
            f"{url} is not at or below {node_url}, the --url of this safekeeper: it archives "
            "nowhere else"
        )
    return url


def _is_at_or_below(url: str, node_url: str) -> bool:
    match parse_url(url), parse_url(node_url):
        case FileUrl(path), FileUrl(above):
            return path.is_relative_to(above)
        case BucketUrl() as place, BucketUrl() as above_it:
            is_same_bucket = (place.provider, place.bucket) == (above_it.provider, above_it.bucket)
            return is_same_bucket and f"{place.folder}/".startswith(_with_slash(above_it.folder))
        case MemoryUrl(name), MemoryUrl(other):
            return name == other
        case _:
            return False


def _with_slash(folder: str) -> str:
    return f"{folder}/" if folder else ""
