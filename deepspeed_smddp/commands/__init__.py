"""The command line, ``smddp``: one module for each command."""
