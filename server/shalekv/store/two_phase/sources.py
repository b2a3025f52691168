"""Names of sources: temporary objects of two-phase compare-and-swap."""

from __future__ import annotations

from random import Random
from uuid import UUID

from shalekv.format.names import UUID_BYTES, temporary_name
from shalekv.protocol.two_phase import Destination

UUID_VERSION = 4


def new_source(random: Random, destination: Destination, checksum: int) -> str:
    """A name that no attempt ever had: two that drew the same would destroy what one of them put.

    That is why the checksum of the object is in it as well (seed 000).
    """
    uuid = UUID(bytes=random.randbytes(UUID_BYTES), version=UUID_VERSION)
    return temporary_name(destination.name, uuid.bytes, checksum)


def no_source(random: Random, destination: Destination) -> str:
    """The same, for an object that nobody will ever put."""
    return new_source(random, destination, checksum=0)
