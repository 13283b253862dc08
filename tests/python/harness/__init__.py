"""Worlds of real rank processes, started once and reused; every call has a deadline."""
