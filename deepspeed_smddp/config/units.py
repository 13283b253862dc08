"""Numbers with their units, as text for people."""

from __future__ import annotations


def number_text(value: float, digits: int = 3) -> str:
    """So many significant digits, and all of those before the point: no exponent.

    >>> number_text(0.01234), number_text(999.9)
    ('0.0123', '999.9')
    """
    return f"{value:.{max(digits, len(f'{value:.0f}'))}g}"


def rate_text(bytes_per_second: float) -> str:
    """``98.5 Mbit/s``."""
    bits = 8 * bytes_per_second
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{number_text(bits / scale)} {unit}"
    return f"{number_text(bits / 1e3)} kbit/s"


def size_text(count: int, digits: int = 3) -> str:
    """Bytes in the largest binary unit that they reach, ``1.5 MiB``, with so many digits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{number_text(count / scale, digits)} {unit}"
    return f"{count} B"
