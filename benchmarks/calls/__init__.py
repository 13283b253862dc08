"""The benchmark of single collective calls, inside a host or between hosts, beside peers."""
