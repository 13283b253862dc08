"""The command line, ``smddp``: one module for each command, with its options and its help.

They import what needs torch only when they run.
"""
