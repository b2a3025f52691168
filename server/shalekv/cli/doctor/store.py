"""Judges an object store: credentials, permissions, clock, rules of the bucket, folders. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shalekv.cli.console.units import size
from shalekv.cli.doctor.diagnosis import STORE, Diagnosis
from shalekv.store.bucket_rules import BucketRules, LifecycleRule, NoncurrentVersions, NotTold
from shalekv.store.verify.operations import Trial, TrialOutcome
from shalekv.wording import counted

# S3, Google and Azure refuse signatures that are older or newer than 15 minutes.
CLOCK_REFUSED_MS = 15 * 60_000
CLOCK_BAD_MS = 5 * 60_000
CLOCK_OFF_MS = 10_000
CLOCK_STEP_MS = 1_000  # of the times that stores report

ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})  # objects there cannot be read at once
SHARED = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs"})
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
NEEDS_S3: Mapping[str, str] = {
    "list": "s3:ListBucket",
    "get": "s3:GetObject and s3:ListBucket",
    "put": "s3:PutObject",
    "delete": "s3:DeleteObject",
}
_SOURCES: Mapping[str, str] = {
    "env": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "shared-credentials-file": "the file of credentials of AWS's tools",
    "config-file": "the configuration file of AWS's tools",
    "iam-role": "the role of the machine",
    "container-role": "the role of the container",
    "assume-role": "a role that is assumed",
    "assume-role-with-web-identity": "a role by web identity",
    "custom-process": "a program that the profile names",
    "sso": "single sign-on",
}


@dataclass(frozen=True, slots=True)
class DatabaseFolder:
    """A folder of this machine that has a database, or is to have one."""

    path: str
    exists: bool
    is_writable: bool  # or, if it does not exist, the folder in which it would be created
    file_system: str  # such as "ext4"; empty: not known


def judge_source(method: str) -> Diagnosis:
    """Judge where the credentials of S3 come from; `method` is botocore's name of it."""
    return STORE.ok("credentials", f"from {_SOURCES.get(method, method)}")


def judge_trials(trials: Sequence[Trial], *, where: str, is_written: bool) -> Iterator[Diagnosis]:
    """Judge the requests that were tried; `where` has the flags that name the database."""
    done = [trial.operation for trial in trials if trial.outcome is TrialOutcome.DONE]
    if done:
        yield STORE.ok("permissions", f"{', '.join(done)}: done")
    for trial in trials:
        match trial.outcome:
            case TrialOutcome.UNFIT:
                yield STORE.problem(trial.operation, trial.detail, f"shalekv store verify {where}")
            case TrialOutcome.UNANSWERED:
                yield STORE.problem(trial.operation, trial.detail)
            case TrialOutcome.REFUSED:
                permission = NEEDS_S3.get(trial.operation, "")
                fix = "server/docs/stores.md has the permissions that are needed"
                if "s3://" in where and permission:
                    fix = f"aws sts get-caller-identity    # then allow that one {permission}"
                yield STORE.problem(trial.operation, trial.detail, fix)
            case TrialOutcome.DONE:
                pass
    if not is_written:
        yield STORE.unchecked(
            "writes",
            "left out by --read-only: put, put if absent, delete",
            f"shalekv doctor {where}",
        )


def judge_clock(offset_ms: int, *, precision_ms: int) -> Diagnosis:
    """Judge by how much this machine's clock is ahead of the store's, negative: behind.

    `precision_ms` is how far the measured offset may be from the real one.
    """
    side = "ahead of" if offset_ms > 0 else "behind"
    evidence = (
        f"this machine's is {abs(offset_ms) / 1_000:.3f} s {side} the store's "
        f"(measured to {precision_ms / 1_000:.3f} s)"
    )
    off_ms = max(0, abs(offset_ms) - precision_ms)
    fix = "timedatectl set-ntp true && timedatectl timesync-status"
    if off_ms >= CLOCK_BAD_MS:
        return STORE.problem(
            "clock",
            f"{evidence}; requests are refused from {CLOCK_REFUSED_MS // 60_000} minutes on",
            fix,
        )
    if off_ms >= CLOCK_OFF_MS:
        return STORE.warning("clock", evidence, fix)
    return STORE.ok("clock", evidence)


def judge_rules(
    rules: BucketRules, *, bucket: str, folder: str, endpoint_url: str = ""
) -> Iterator[Diagnosis]:
    """Judge the rules of a bucket for the database in its folder; "" is the whole bucket."""
    tool = "aws s3api" + (f" --endpoint-url {endpoint_url}" if endpoint_url else "")
    command = f"{tool} {{}} --bucket {bucket}"
    yield from _lifecycle(rules, command, folder)
    yield from _versions(rules, command, folder)
    if isinstance(rules.lock, NotTold):
        yield STORE.unchecked("object lock", rules.lock.reason)
    elif not rules.lock:
        yield STORE.ok("object lock", "the bucket has none")
    elif rules.lock == "no default":
        yield STORE.warning(
            "object lock",
            "on, without a default retention: objects that somebody locks are not collected",
            "use a bucket without object lock",
        )
    else:
        yield STORE.problem(
            "object lock",
            f"objects are kept by {rules.lock}: the collector frees nothing before",
            command.format("put-object-lock-configuration")
            + " --object-lock-configuration ObjectLockEnabled=Enabled",
        )


def _lifecycle(rules: BucketRules, command: str, folder: str) -> Iterator[Diagnosis]:
    if isinstance(rules.lifecycle, NotTold):
        yield STORE.unchecked("lifecycle", rules.lifecycle.reason)
        return
    concerned = [rule for rule in rules.lifecycle if rule.concerns(folder)]
    harmful = [*_harmful(concerned, command)]
    yield from harmful
    if not harmful:
        yield STORE.ok(
            "lifecycle",
            f"{counted(len(rules.lifecycle), 'rule')}, none expires or archives objects of the "
            "database",
        )
    if not any(rule.abort_days is not None for rule in concerned):
        yield STORE.ok(
            "uploads in parts",
            "no rule aborts abandoned ones: the collector does, after a day, if it runs",
        )


def _harmful(rules: Sequence[LifecycleRule], command: str) -> Iterator[Diagnosis]:
    fix = (
        command.format("get-bucket-lifecycle-configuration")
        + "    # then put it again without this rule, or with a prefix outside of the database"
    )
    for rule in rules:
        about = f"rule {rule.id!r} for the prefix {rule.prefix!r}"
        about += ", some objects of it," if rule.is_narrowed else ""
        if rule.expires:
            yield STORE.problem(
                "lifecycle",
                f"{about} deletes objects of the database {rule.expires}: data will be lost",
                fix,
            )
        archives = sorted(ARCHIVES.intersection(rule.storage_classes))
        if archives:
            yield STORE.problem(
                "lifecycle",
                f"{about} moves objects to {', '.join(archives)}, where reads fail",
                fix,
            )


def _versions(rules: BucketRules, command: str, folder: str) -> Iterator[Diagnosis]:
    if isinstance(rules.versioning, NotTold):
        yield STORE.unchecked("versioning", rules.versioning.reason)
        return
    if not rules.versioning:
        yield STORE.ok("versioning", "off")
        return
    costs = _noncurrent_text(rules.noncurrent)
    lifecycle = [] if isinstance(rules.lifecycle, NotTold) else rules.lifecycle
    days = [
        rule.noncurrent_days
        for rule in lifecycle
        if rule.concerns(folder) and rule.noncurrent_days is not None and not rule.is_narrowed
    ]
    state = rules.versioning.lower()
    if days:
        yield STORE.warning(
            "versioning",
            f"{state}: deleted objects cost storage for {min(days)} more days; {costs}",
            command.format("put-bucket-versioning")
            + " --versioning-configuration Status=Suspended",
        )
        return
    prefix = f"{folder}/" if folder else ""
    rule = (
        '{"Rules": [{"ID": "noncurrent", "Status": "Enabled", "Filter": {"Prefix": "'
        f'{prefix}"}}, "NoncurrentVersionExpiration": {{"NoncurrentDays": 1}}}}]}}'
    )
    yield STORE.warning(
        "versioning",
        f"{state}, and no rule deletes noncurrent versions: collected objects cost storage for "
        f"ever; {costs}",
        command.format("put-bucket-lifecycle-configuration")
        + f" --lifecycle-configuration '{rule}'    # replaces all rules of the bucket",
    )


def _noncurrent_text(found: NoncurrentVersions | NotTold | None) -> str:
    if not isinstance(found, NoncurrentVersions):
        return f"how much is not known: {found.reason}" if found else "how much is not known"
    least = "" if found.is_all else "at least "
    return f"{least}{counted(found.versions, 'version')} with {size(found.size_bytes)} now"


def judge_folder(folder: DatabaseFolder, *, where: str) -> Iterator[Diagnosis]:
    """Judge the folder of a database, and the file system that it is on."""
    if not folder.is_writable:
        yield STORE.problem(
            "folder",
            f"{folder.path} cannot be written by this user",
            f"sudo chown -R \"$(id -u)\" '{folder.path}'",
        )
    elif not folder.exists:
        yield STORE.warning(
            "folder", f"{folder.path} does not exist", f"shalekv serve --create {where}"
        )
    else:
        yield STORE.ok("folder", f"{folder.path} can be written")
    kind = folder.file_system
    if not kind:
        yield STORE.unchecked("file system", "its kind is not known on this system")
    elif kind in SHARED or kind.startswith("fuse"):
        yield STORE.warning(
            "file system",
            f"{kind}: whether creates are atomic, and syncs durable, depends on its server",
            f"shalekv store verify {where}",
        )
    elif kind in IN_MEMORY:
        yield STORE.warning(
            "file system",
            f"{kind} is memory: all is lost when the machine stops",
            "choose a folder on a disk",
        )
    elif kind == "overlay":
        yield STORE.warning(
            "file system",
            "overlay: in a container, what is stored goes with the container",
            "docker run -v shalekv-data:/data ...",
        )
    else:
        yield STORE.ok("file system", kind)
