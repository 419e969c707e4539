"""The durable queue: requests, the events of their answers, and answers, in SQLite or PostgreSQL.

`database` opens it for one server at a time, `requests` has the queries, `journal` is the thread that writes. Nothing
here runs sequences.
"""

from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal

__all__ = ["Journal", "QueueDatabase"]
