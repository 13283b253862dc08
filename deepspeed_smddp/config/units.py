"""Numbers with their units, as text for people."""

from __future__ import annotations


def rate_text(bytes_per_second: float) -> str:
    """``98.5 Mbit/s``."""
    bits = 8 * bytes_per_second
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def size_text(count: int, digits: int = 3) -> str:
    """Bytes in the largest binary unit that they reach, ``1.5 MiB``, with so many digits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.{digits}g} {unit}"
    return f"{count} B"
