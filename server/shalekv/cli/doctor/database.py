"""Judges a database in its store: its manifest, what pins what, and the work that waits. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from shalekv.cli.console.units import size
from shalekv.cli.doctor.diagnosis import Area, Diagnosis
from shalekv.jobs.collect import Amount
from shalekv.protocol.lease import made_ms
from shalekv.protocol.manifest import (
    MANIFEST_FORMAT_VERSION,
    CasMode,
    Lease,
    Manifest,
    level_sizes,
    total_bytes,
)
from shalekv.protocol.membership import Configuration
from shalekv.protocol.origins import is_pin
from shalekv.protocol.retention import RETENTION_HOLDER, PinnedBytes
from shalekv.protocol.snapshot import NEVER
from shalekv.settings import CompactorSettings
from shalekv.wording import counted, moment
from shalekv.write.quorum.membership import MemberProbe

DATABASE = Area("database")

PINNED_BYTES = 1_000_000_000  # what a pin may keep without a warning
GARBAGE_BYTES = 1_000_000_000
GARBAGE_OBJECTS = 10_000
ARCHIVE_BYTES = 1_000_000_000
UNCOMPACTED_TRIGGERS = 4  # times the size at which a compactor begins
RECORDS_MAX = 100  # interrupted creates, of two phases

CLONES = "snapshots for clones"
_BACKUP, _CLONE = "backup ", "clone "  # the names of their snapshots begin so


def amount_text(amount: Amount) -> str:
    """Format a number of objects and their size, for the middle of a sentence."""
    return f"{counted(amount.objects, 'object')} with {size(amount.size_bytes)}"


def judge_manifest(manifest: Manifest, *, is_two_phase: bool, where: str) -> Iterator[Diagnosis]:
    """Judge the manifest. `is_two_phase`: the settings say so; `where` names the database."""
    yield DATABASE.ok(
        "manifest",
        f"number {manifest.manifest_id}, format {MANIFEST_FORMAT_VERSION} as this version writes, "
        f"database {manifest.database_id.hex()}",
    )
    if manifest.cas_mode is CasMode.TWO_PHASE and not is_two_phase:
        yield DATABASE.warning(
            "creates",
            "the database uses --cas two_phase, and the settings name no records: it can be read "
            "only",
            f"shalekv doctor {where} --records-url ...    # or SHALEKV_STORE__RECORDS_URL",
        )
    elif manifest.cas_mode is CasMode.NATIVE and is_two_phase:
        yield DATABASE.problem(
            "creates",
            "the database uses conditional writes, and the settings say --cas two_phase",
            "unset SHALEKV_STORE__CAS SHALEKV_STORE__RECORDS_URL",
        )


def judge_writer(manifest: Manifest, elected: str) -> Diagnosis:
    """Judge who claims to be the writer; `elected` describes the lease of an election."""
    who = manifest.writer_address or "a writer that did not say its address"
    evidence = f"epoch {manifest.writer_epoch}, opened by {who}"
    if not manifest.writer_nonce.strip(b"\0"):
        evidence = "no writer has opened the database yet"
    return DATABASE.ok("writer", f"{evidence}; {elected or 'no election in the bucket'}")


def judge_wal(
    manifest: Manifest, sizes: Mapping[int, int], settings: CompactorSettings, *, where: str
) -> Diagnosis:
    """Judge the length of the WAL; `sizes` has the bytes of each WAL object, by id."""
    first = manifest.first_uncompacted_wal_id
    waiting = [each for wal_id, each in sizes.items() if wal_id >= first]
    amount = Amount(len(waiting), sum(waiting))
    total = Amount(len(sizes), sum(sizes.values()))
    evidence = f"{amount_text(amount)} not compacted, {amount_text(total)} in all"
    if amount.size_bytes > UNCOMPACTED_TRIGGERS * settings.wal_trigger_bytes:
        return DATABASE.warning(
            "wal",
            f"{evidence}: openings are slow, and at the memory limit writes are refused; no "
            "compactor seems to run",
            f"shalekv compactor {where} --once",
        )
    return DATABASE.ok("wal", evidence)


def judge_debt(
    manifest: Manifest, debt_bytes: int, settings: CompactorSettings, *, where: str
) -> Diagnosis:
    """Judge how far compaction is behind."""
    sizes = level_sizes(manifest.leveled_ssts)
    stored = total_bytes(sizes)
    evidence = (
        f"debt about {size(debt_bytes)}; {counted(len(manifest.leveled_ssts), 'SST')} with "
        f"{size(stored)} in {counted(len(sizes), 'level')}"
    )
    if debt_bytes > max(UNCOMPACTED_TRIGGERS * settings.wal_trigger_bytes, stored):
        return DATABASE.warning("compaction", evidence, f"shalekv compactor {where} --once")
    return DATABASE.ok("compaction", evidence)


def judge_snapshots(
    pinned: Sequence[PinnedBytes], expired: int, *, where: str
) -> Iterator[Diagnosis]:
    """Judge what the snapshots keep, by their kind; `expired` of them keep nothing any more."""
    kinds: dict[str, list[PinnedBytes]] = {}
    for each in pinned:
        kinds.setdefault(_kind(each), []).append(each)
    for kind, members in sorted(kinds.items()):
        yield _snapshots_of(kind, members, where)
    if not pinned:
        more = f", {counted(expired, 'expired one')}" if expired else ""
        yield DATABASE.ok("snapshots", f"none{more}")


def _kind(pinned: PinnedBytes) -> str:
    snapshot = pinned.snapshot
    if is_pin(snapshot) or snapshot.name.startswith(_CLONE):
        return CLONES
    if snapshot.name.startswith(_BACKUP):
        return "snapshots of backups"
    return "snapshots" if snapshot.name else "snapshots of servers"


def _snapshots_of(kind: str, members: Sequence[PinnedBytes], where: str) -> Diagnosis:
    largest = max(members, key=lambda each: each.alone_bytes or 0)
    created = [each.snapshot.created_ms for each in members if each.snapshot.created_ms]
    kept = max(each.size_bytes or 0 for each in members)
    name = largest.snapshot.name or largest.snapshot.id.hex()
    verb = "keeps" if len(members) == 1 else "keep"
    evidence = f"{counted(len(members), 'snapshot')} {verb} {size(kept)} beyond the current state"
    if largest.alone_bytes:
        evidence += f", {name} alone {size(largest.alone_bytes)}"
    if created:
        evidence += f"; the oldest was made at {moment(min(created))}"
    unread = sum(each.size_bytes is None for each in members)
    if unread:
        fix = f"shalekv fsck {where}"
        return DATABASE.problem(kind, f"{evidence}; the manifests of {unread} are missing", fix)
    if kept <= PINNED_BYTES:
        return DATABASE.ok(kind, evidence)
    force = " --force    # only if the clone is gone" if kind == CLONES else ""
    return DATABASE.warning(
        kind, evidence, f"shalekv snapshot delete {shlex.quote(name)} {where}{force}"
    )


def judge_leases(
    manifest: Manifest, sizes: Mapping[int, int], now_s: float, *, where: str
) -> Iterator[Diagnosis]:
    """Judge what consumers, the retention and jobs keep; `now_s` by the store's clock."""
    compacted = manifest.wal_id_last_compacted or 0
    on_wal = [each for each in manifest.leases if each.wal_id_min is not None]
    for lease in on_wal:
        least = lease.wal_id_min or 0
        kept = [each for wal_id, each in sizes.items() if least <= wal_id < compacted]
        yield _wal_lease(lease, Amount(len(kept), sum(kept)), now_s, where)
    jobs = [each for each in manifest.leases if each.wal_id_min is None]
    begun = [at for each in jobs if (at := made_ms(each)) is not None]
    if not jobs:
        return
    evidence = f"{counted(len(jobs), 'lease')} of {', '.join(sorted({j.holder for j in jobs}))}"
    evidence += f", the oldest of {moment(min(begun))}" if begun else ""
    lasting = [each for each in jobs if each.expire_time_s == NEVER]
    late = [at for at in begun if at > (now_s + 3_600) * 1_000]
    if lasting or late:
        yield DATABASE.warning(
            "jobs",
            f"{evidence}; {len(lasting) + len(late)} last for ever, or are from the future",
            f"shalekv admin leases list {where}",
        )
    else:
        yield DATABASE.ok("jobs", evidence)


def _wal_lease(lease: Lease, kept: Amount, now_s: float, where: str) -> Diagnosis:
    is_retention = lease.holder == RETENTION_HOLDER
    name = lease.holder.removeprefix("consumer ").partition("\t")[0]
    check = "wal retention" if is_retention else "consumers"
    evidence = (
        f"{'the retention' if is_retention else name} keeps {amount_text(kept)} of compacted WAL"
    )
    if lease.expire_time_s != NEVER:
        is_over = lease.expire_time_s < now_s
        evidence += f", until {moment(lease.expire_time_s * 1_000)}"
        evidence += " (expired: until the next collection)" if is_over else ""
    if kept.size_bytes <= PINNED_BYTES or is_retention:
        return DATABASE.ok(check, evidence)
    return DATABASE.warning(
        check, evidence, f"shalekv consumers delete {shlex.quote(name)} {where}"
    )


def judge_garbage(garbage: Amount, total: Amount, *, where: str) -> Diagnosis:
    """Judge the objects that a collector could delete now."""
    evidence = f"{amount_text(garbage)} could be deleted now, of {amount_text(total)}"
    if garbage.objects > GARBAGE_OBJECTS or garbage.size_bytes > max(
        GARBAGE_BYTES, total.size_bytes // 2
    ):
        return DATABASE.warning(
            "garbage",
            f"{evidence}; no collector seems to run",
            f"shalekv collector {where} --once",
        )
    return DATABASE.ok("garbage", evidence)


def judge_safekeepers(
    configuration: Configuration, probes: Sequence[MemberProbe], *, where: str
) -> Iterator[Diagnosis]:
    """Judge the safekeepers, and what they have not archived yet."""
    sound = [each.member.id for each in probes if each.is_sound]
    bad = [
        f"{each.member.address} ({each.problem or 'its log is not sound'})"
        for each in probes
        if not each.is_sound
    ]
    evidence = f"{len(sound)} of {counted(len(probes), 'safekeeper')} answer with a sound log"
    fix = f"shalekv safekeeper status {where}"
    if not configuration.is_majority(sound):
        yield DATABASE.problem(
            "safekeepers", f"{evidence}, no majority: writes fail; {', '.join(bad)}", fix
        )
    elif bad:
        yield DATABASE.warning(
            "safekeepers", f"{evidence}: losing more may stop writes; {', '.join(bad)}", fix
        )
    else:
        yield DATABASE.ok("safekeepers", evidence)
    states = [each.status for each in probes if each.status is not None]
    if not states:
        yield DATABASE.unchecked("archive", "no safekeeper answers: see above")
        return
    waiting = max(state.log_bytes for state in states)
    failing = next((state.archive_problem for state in states if state.archive_problem), "")
    full = next((state.full_problem for state in states if state.full_problem), "")
    backlog = f"{size(waiting)} of the log wait in safekeepers to be archived or trimmed"
    if full:
        yield DATABASE.problem("archive", f"{backlog}; writes are refused: {full}", fix)
    elif failing:
        yield DATABASE.problem("archive", f"{backlog}; archiving fails: {failing}", fix)
    elif waiting > ARCHIVE_BYTES:
        yield DATABASE.warning("archive", backlog, fix)
    else:
        yield DATABASE.ok("archive", backlog)


def judge_records(interrupted: int, *, where: str) -> Diagnosis:
    """Judge the records of creates that were begun, and not completed."""
    evidence = f"{counted(interrupted, 'create')} in progress or interrupted"
    if interrupted > RECORDS_MAX:
        return DATABASE.warning("records", evidence, f"shalekv admin recover {where}")
    return DATABASE.ok("records", evidence)
