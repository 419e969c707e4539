"""Alembic's environment: runs migrations on the connection, and in the transaction, that `engine.migrate` passes.

Alembic executes this file; it is not imported.
"""

from alembic import context

from zoo.catalog.migrations import VERSION_TABLE
from zoo.catalog.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
