"""The versions of the catalogue's tables, run by `zoo.catalog.engine.migrate` when a store is opened.

A new version is a file `versions/NNNN_what.py` and a new HEAD; tests check that both, and `schema.py`, agree. A version
that was released is never edited.
"""

#: The newest version.
HEAD = "0002"
#: Where a database keeps the version that it has.
VERSION_TABLE = "zoo_schema_version"
