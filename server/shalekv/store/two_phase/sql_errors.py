"""What an error of an SQL database says about the statement that it answers.

The databases number their errors, each in its own way. Whatever is not known to be an answer counts
as none: the statement may have been carried out, or may still be.
"""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, IntegrityError

from shalekv.store.two_phase.answers import Answer

SQLITE_NOT_DONE = frozenset({5, 6, 13})  # busy, locked, disk full
SQLITE_REFUSED = frozenset({1, 3, 8, 14, 23, 26})  # no such table, permission, read-only, no file

# Errors of the server, but for those of a connection or a commit that was cut short.
MYSQL_SERVER = (range(1000, 2000), range(3000, 5000))
MYSQL_UNKNOWN = frozenset({1053, 1080, *range(1152, 1162), 1180, 1184, 1317, 1927, 1969, 3024})
# No such user, database, table or column, no permission, read-only.
MYSQL_REFUSED = frozenset(
    {1044, 1045, 1049, 1054, 1142, 1143, 1146, 1227, 1290, 1698, 1792, 1820, 1836, 3118}
)

POSTGRES_UNKNOWN = ("08", "57P", "40003", "58", "XX")
# Authorization, no such database, syntax or permission, read-only.
POSTGRES_REFUSED = ("28", "3D", "3F", "42", "25006")


def answer_in(error: BaseException) -> Answer:
    """What `error` says about the statement that it was raised by."""
    if isinstance(error, IntegrityError):
        return Answer.CONFLICT
    original = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if isinstance(sqlstate, str):
        return _postgres(sqlstate)
    sqlite_code = getattr(original, "sqlite_errorcode", None)
    if isinstance(sqlite_code, int):
        return _sqlite(sqlite_code & 0xFF)
    arguments = getattr(original, "args", ())
    if arguments and isinstance(arguments[0], int) and not isinstance(original, OSError):
        return _mysql(arguments[0])
    return Answer.UNKNOWN


def _postgres(sqlstate: str) -> Answer:
    if sqlstate.startswith(POSTGRES_UNKNOWN):
        return Answer.UNKNOWN
    return Answer.REFUSED if sqlstate.startswith(POSTGRES_REFUSED) else Answer.NOT_DONE


def _sqlite(code: int) -> Answer:
    if code in SQLITE_REFUSED:
        return Answer.REFUSED
    return Answer.NOT_DONE if code in SQLITE_NOT_DONE else Answer.UNKNOWN


def _mysql(code: int) -> Answer:
    if code in MYSQL_UNKNOWN or not any(code in numbers for numbers in MYSQL_SERVER):
        return Answer.UNKNOWN
    return Answer.REFUSED if code in MYSQL_REFUSED else Answer.NOT_DONE
