"""The table of records in SQL, with keys that compare by their bytes in every database.

    shalekv_records
      database      the URL of the store        these two are the primary key
      destination   the name of the object
      source        the name of the temporary object in the same database
      committed     whether the destination has been made

A collation that knows letters would take two databases, or two objects, for one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Column, Dialect, MetaData, Table, Text
from sqlalchemy.dialects.mysql import VARBINARY
from sqlalchemy.types import TypeDecorator, TypeEngine

# InnoDB has 3,072 bytes for a key. The longest URL has a folder of which all is escaped:
# 5 + 222 + 1 + 3 * 400. Names end at 512 bytes.
DATABASE_BYTES = 1_500
NAME_BYTES = 640
TABLE_NAME = "shalekv_records"


class Bytewise(TypeDecorator[Any]):
    """ASCII text that compares and orders by its bytes, spaces at its end included."""

    impl = Text
    cache_ok = True

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Bytes where no text compares by them alone; the collation C in PostgreSQL."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(VARBINARY(self.max_bytes))
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Text(collation="C"))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | bytes | None:
        """What the driver is given."""
        if value is not None and dialect.name in {"mysql", "mariadb"}:
            return value.encode("ascii")
        return value

    def process_result_value(self, value: str | bytes | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """What the driver answers, as text."""
        return value.decode("ascii") if isinstance(value, bytes) else value


RECORDS = Table(
    TABLE_NAME,
    MetaData(),
    Column("database", Bytewise(DATABASE_BYTES), primary_key=True),
    Column("destination", Bytewise(NAME_BYTES), primary_key=True),
    Column("source", Bytewise(NAME_BYTES), nullable=False),
    Column("committed", Boolean, nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)
