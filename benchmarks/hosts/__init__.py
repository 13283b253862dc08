"""Collectives between ranks of one host or of several, measured in turns with their peers."""
