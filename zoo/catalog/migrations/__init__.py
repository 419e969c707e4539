"""The versions of the catalogue's tables, run by `zoo.catalog.engine.migrate` when a store is opened.

A new version is a file `versions/NNNN_what.py` and a new HEAD; tests check that these and `schema.py` agree. A released
version is never edited.
"""

#: The newest version.
HEAD = "0007"
#: Table in which a database records its version.
VERSION_TABLE = "zoo_schema_version"
