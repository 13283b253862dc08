"""The counters of the collectives, written to where people look: a table, files, Prometheus.

Knows no other room. ``reporter`` follows the settings; the package's entry starts that.
"""
