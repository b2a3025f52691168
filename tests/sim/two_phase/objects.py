"""The objects of a store without conditional writes: they are put and copied over what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shalekv.format.names import parse_temporary_name
from shalekv.store.api import StoredObject
from tests.sim.nodes import Node
from tests.sim.objects import Objects, run_now
from tests.sim.two_phase.happenings import Change, Happening, ObjectChanged

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

_CHANGES = {"create": Change.COPIED, "copy": Change.COPIED, "put": Change.PUT}


class PlainObjects(Objects):
    """What is told of each change: `log` has what came to be and what went, as for other stores.

    Temporary objects, and copies over what is there, are among what happened and not in `log`. Who
    made an object is whoever has put its bytes, and not who has helped and copied them.
    """

    def __init__(self, loop: SimLoop, node: Node, happened: list[Happening]) -> None:
        super().__init__(loop, node)
        self._happened = happened
        self._authors: dict[bytes, Node] = {}  # by what they have put

    def put(self, sender: Node, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Apply a put."""
        run_now(self._store.put(name, data, metadata))
        self._authors.setdefault(data, sender)
        self._record(sender, "put", name, data)

    def find(self, source: str) -> StoredObject:
        """What a copy reads. Raises `ObjectNotFound`."""
        return run_now(self._store.get(source))

    def land(self, sender: Node, name: str, found: StoredObject) -> None:
        """Write what a copy has read, over whatever is there."""
        operation = "create" if self._objects.find(name) is None else "copy"
        run_now(self._store.put(name, found.data, found.metadata))
        self._record(sender, operation, name, found.data)

    def _record(self, sender: Node, operation: str, name: str, data: bytes) -> None:
        if operation in {"create", "delete"} and parse_temporary_name(name) is None:
            super()._record(self._authors.get(data, sender), operation, name, data)
        else:
            self._loop.note(f"{name}: {operation}", self._node)
        change = _CHANGES.get(operation, Change.DELETED)
        self._happened.append(ObjectChanged(sender.label, change, name, data))
