"""The whole database over a store without conditional writes, and records in another store."""
