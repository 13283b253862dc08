"""The routes that this user's jobs have measured, for ``smddp doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from deepspeed_smddp.diagnostics.doctor.facts import Finding
from deepspeed_smddp.tuning import cache, routes


def findings() -> Iterator[Finding]:
    """What the route "auto" has measured, of each collective and group, and what it chooses."""
    for when, known in cache.all_of(cache.ROUTES):
        date = datetime.fromtimestamp(when).astimezone().date()
        yield Finding("routes", f"{routes.sentence(known)} ({date})")
