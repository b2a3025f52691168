"""The stage of one scenario: the world, its writers and their puts, and what is held where."""

from __future__ import annotations

from shalekv.core.manifest import Manifest
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.sst import Sst, open_sst
from tests.scenarios.attempts import Attempts
from tests.scenarios.openings import Opening, Put
from tests.sim.script import Gate
from tests.sim.world import World


class Stage:
    """What sentences act on and speak of. Slots are those of the scenario: see `first_slot`."""

    def __init__(self, world: World) -> None:
        """REQUIRES: nothing was sent yet."""
        self.world = world
        self.attempts = Attempts(world)
        self.openings: dict[int, Opening] = {}
        self.puts: dict[str, Put] = {}  # by "key=value"
        self.gates: dict[str, Gate] = {}  # by the request, as the scenario calls it
        self.faults: dict[str, str] = {}  # fault by request, as the timeline calls them
        self.first_slot = 0  # the WAL id of slot 0 of the scenario
        self.first_attempt = 0  # in the WAL: time 0 of the scenario
        self.told_attempts = 0  # how many of those in the WAL stood in a table
        self.told_manifests = 0  # how many of those in the manifest stood in a table

    def opening(self, number: str) -> Opening:
        """Writer `number`, which has begun to open."""
        return self.openings[int(number)]

    def begin(self, number: str, options: str | None) -> Opening:
        """Let writer `number` begin to open with `options` such as "a=1, b=2"."""
        assert int(number) not in self.openings, f"writer {number} opened before"
        pairs = dict(pair.split("=") for pair in options.split(", ")) if options else {}
        opening = Opening(self.world, int(number), pairs)
        self.openings[int(number)] = opening
        return opening

    def wal_name(self, slot: int) -> str:
        """The object in a slot of the scenario."""
        return names.wal_name(self.first_slot + slot)

    def wal(self) -> list[Sst]:
        """All objects of the WAL, by slot."""
        found = self.world.store.names(names.WAL_FOLDER)
        return [open_sst(name, self._data(name), database_id=None) for name in found]

    def manifest(self, manifest_id: int) -> Manifest:
        """A manifest that is in the store."""
        name = names.manifest_name(manifest_id)
        return decode_manifest(name, self._data(name))

    def manifest_ids(self) -> list[int]:
        """The manifests that are in the store."""
        found = map(names.parse_manifest_name, self.world.store.names(names.MANIFEST_FOLDER))
        return [manifest_id for manifest_id in found if manifest_id is not None]

    def check_all_is_told(self) -> None:
        """Fail if something happened of which the scenario does not speak, or the reverse."""
        for put, outcome in self.puts.items():
            assert outcome.is_told or outcome.is_lost, (
                f"nothing is said about {put}, which is {outcome.now()}"
            )
        for number, opening in self.openings.items():
            error = opening.error_now()
            assert opening.is_told or error is None, f"writer {number} has failed: {error}"
        for request, gate in self.gates.items():
            assert gate.arrived_count, f"{request} never arrived"
        for request, fault in self.faults.items():
            assert self.attempts.has_fault(request, fault), f"no {request} was {fault}"

    def _data(self, name: str) -> bytes:
        data = self.world.store.data(name)
        assert data is not None, f"{name} is not there"
        return data
