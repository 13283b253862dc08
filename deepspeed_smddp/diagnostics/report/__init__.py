"""Turns the dumps of all ranks of a job into one page that says why the job hangs.

``dump`` reads what each rank has left, ``analysis`` finds causes, ``page`` writes the text, and
``fr_trace`` writes the same operations for torch's own analyzer. Nothing here needs the extension.
"""
