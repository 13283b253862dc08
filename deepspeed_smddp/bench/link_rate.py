"""The rate of the NICs over which smddp leaves this host, as far as their drivers state it."""

from __future__ import annotations

import re
from pathlib import Path

from deepspeed_smddp.diagnostics.doctor import machine
from deepspeed_smddp.distributed import extension


def of_host() -> float:
    """Bytes per second of the NICs that libfabric's provider uses here, one direction.

    0 if one of them states no rate, or there is no libfabric.
    """
    extension.load()
    from deepspeed_smddp import _C

    try:
        return rate_of(machine.nics_of(_C.fabric_description()), Path("/sys"))
    except RuntimeError:
        return 0.0


def rate_of(names: list[str], sysfs: Path) -> float:
    """Bytes per second of these network interfaces or RDMA devices; 0 if one is not known."""
    megabits = {i.name: float(i.megabits) for i in machine.interfaces()}
    for device in machine.rdma_devices(sysfs):
        stated = re.search(r"(\S+) .*?([0-9.]+) Gb/sec", device)
        if stated:
            megabits[stated[1]] = 1000 * float(stated[2])
    # A provider names a device's domain, such as rdmap0s6-rdm of rdmap0s6.
    rates = [megabits.get(name) or megabits.get(name.rpartition("-")[0], 0.0) for name in names]
    return sum(rates) * 1e6 / 8 if all(rates) else 0.0
