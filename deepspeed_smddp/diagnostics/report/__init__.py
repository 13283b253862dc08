"""Turns the dumps of all ranks of a job into one page that says why the job hangs.

``dump`` reads what each rank has left, ``causes`` finds causes, ``page`` writes the text, and
``fr_trace`` writes the same operations for torch's own analyzer. Nothing here needs the extension.

Here is what the ranks that write dumps share with the report that reads them, besides the fields:
every process that uses smddp imports it, and not the models of ``dump``, which need pydantic.
"""

# How the fields of ``Dump.network`` begin that hold the state of a NIC's link.
LINK = "link "
# States of a connection that nothing is to be said of.
IN_ORDER = ("not contacted", "connected")
# For how long the rank that writes the page waits for the dumps of the others.
DUMP_SECONDS = 10.0
