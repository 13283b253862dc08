"""Collectives between emulated hosts, measured in turns with their peers."""
