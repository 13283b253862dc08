"""From the dumps of all ranks to a trace and a picture of their collectives on one clock.

``timeline`` says what each rank did when, ``views`` makes a trace and a picture of it. Nothing here
needs the extension.
"""
