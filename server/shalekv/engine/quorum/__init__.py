"""The quorum WAL seen from a writer and from readers: safekeepers, reached through links."""
