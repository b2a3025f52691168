"""What is wrong with a database as a whole, or with how it is opened."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class DatabaseError(ShaleError):
    """The database as a whole is not as it must be."""

    reason = "DATABASE"


class DatabaseNotFound(DatabaseError):
    """There is no database at this URL. Check it, or create one with `shalekv serve --create`."""

    reason = "DATABASE_NOT_FOUND"


class DatabaseExists(DatabaseError):
    """There is a database at this URL already."""

    reason = "DATABASE_EXISTS"


class DatabaseMismatch(DatabaseError):
    """The database was created in another way than it is opened in."""

    reason = "DATABASE_MISMATCH"


class ImplausibleTime(DatabaseError):
    """The store's clock is far from all that it can be compared with. Set the clocks right."""

    reason = "IMPLAUSIBLE_TIME"


class OriginLost(DatabaseError):
    """The database that this one was cloned from does not keep the SSTs any more that both share.

    They may be deleted. Restore the clone from a copy, or make it anew.
    """

    reason = "ORIGIN_LOST"


class ManifestVersionExists(DatabaseError):
    """Another process edited the manifest first, and the caller asked not to try again.

    With `--open-once`: another writer opened the database at the same time.
    """

    reason = "MANIFEST_VERSION_EXISTS"


class ManifestConflict(DatabaseError):
    """Other processes edited the manifest first, again and again, until the deadline."""

    reason = "MANIFEST_CONFLICT"


class IllegalState(DatabaseError):
    """The protocol rules this out. The process stops and touches nothing."""

    reason = "ILLEGAL_STATE"


class InvalidUrl(ShaleError):
    """Not the URL of a database."""

    reason = "INVALID_URL"


class InvalidSetting(ShaleError):
    """A setting is out of its limits."""

    reason = "INVALID_SETTING"
