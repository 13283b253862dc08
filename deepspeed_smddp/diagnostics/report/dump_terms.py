"""What the ranks that write dumps and the report that reads them share, besides the fields.

Every process that uses smddp imports it, and not the models of ``dump``, which need pydantic.
"""

from __future__ import annotations

# How the fields of ``Dump.network`` begin that hold the state of a NIC's link.
LINK = "link "
# States of a connection that nothing is to be said of.
IN_ORDER = ("not contacted", "connected")
# For how long the rank that writes the page waits for the dumps of the others.
DUMP_SECONDS = 10.0
