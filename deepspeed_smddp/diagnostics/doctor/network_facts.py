"""The network interfaces and RDMA devices of one rank's host."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepspeed_smddp.diagnostics.doctor.fact import Fact
from deepspeed_smddp.diagnostics.doctor.finding import Finding, Verdict

# linux/sockios.h and linux/ethtool.h. By ioctl and not from /sys, which shows the interfaces of the
# network namespace in which it was mounted.
_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCETHTOOL = 0x8913, 0x8921, 0x8946
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_ETHTOOL_GSET = 0x1
_UNKNOWN_SPEEDS = (0, 0xFFFF, 0xFFFFFFFF)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; ``megabits`` is 0 if the driver does not say its rate."""

    name: str
    mtu: int
    megabits: int


def facts(sysfs: Path = Path("/sys")) -> Iterator[Fact]:
    """Rates and MTUs of the interfaces, and the RDMA devices with theirs."""
    found = interfaces()
    chosen = os.environ.get("SMDDP_FABRIC_INTERFACE", "")
    used = [interface for interface in found if interface.name in chosen.split(",")] or found
    names = ", ".join(i.name for i in used)
    yield Fact("NICs", ", ".join(sorted(_rate(i.megabits) for i in used)) or "none", detail=names)
    yield Fact("MTU", ", ".join(sorted({str(i.mtu) for i in used})) or "none")
    yield Fact("RDMA devices", ", ".join(rdma_devices(sysfs)) or "none")


def findings(provider: str, sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """A fast network that is there and that ``provider`` (libfabric's name) does not use."""
    devices = rdma_devices(sysfs)
    efa = [device for device in devices if "efa" in device]
    if efa and "efa" not in provider:
        yield Finding(
            "EFA",
            f"present ({len(efa)} device{'s' if len(efa) > 1 else ''}) but not used: libfabric's "
            f"provider is {provider or 'none'}. Install AWS's EFA software, whose libfabric in "
            "/opt/amazon/efa has the provider efa, and unset SMDDP_FABRIC_PROVIDER and FI_PROVIDER",
            Verdict.LIMITED,
        )
    elif devices and not efa and not ("verbs" in provider or "efa" in provider):
        yield Finding(
            "RDMA",
            f"present ({', '.join(devices)}) but not used: libfabric's provider is "
            f"{provider or 'none'}; a libfabric with the provider verbs would use it",
            Verdict.LIMITED,
        )


def interfaces() -> list[Interface]:
    """The interfaces that are up, without loopback."""
    found = []
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            flags = _number(probe, name, _SIOCGIFFLAGS, "H")
            if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                mtu = _number(probe, name, _SIOCGIFMTU, "i")
                found.append(Interface(name, mtu, _megabits(probe, name)))
    return sorted(found, key=lambda interface: interface.name)


def rdma_devices(sysfs: Path = Path("/sys")) -> list[str]:
    """``["efa_0 (efa) 100 Gb/sec", ...]``: name, driver and rate of each RDMA device."""
    found = []
    for device in sorted((sysfs / "class/infiniband").glob("*")):
        driver = device / "device" / "driver"
        name = driver.resolve().name if driver.exists() else "no driver"
        rates = [rate.read_text().split("(")[0].strip() for rate in device.glob("ports/*/rate")]
        found.append(f"{device.name} ({name}) {rates[0] if rates else ''}".strip())
    return found


def nics_of(rails: str) -> list[str]:
    """``["eth0", "eth1"]`` of "tcp on eth0 (192.0.2.2), eth1 (192.0.2.3), libfabric 1.17".

    The version may be missing; a text without NICs, such as "shared memory", has none.
    """
    places = rails.partition(" on ")[2].partition(", libfabric ")[0]
    return [place.split()[0] for place in places.split(", ") if place]


def link_state(name: str, sysfs: Path = Path("/sys")) -> str:
    """``up``, ``down`` or ``no carrier``; of an RDMA device as its driver says; "" if unknown."""
    ports = sorted((sysfs / "class/infiniband" / name).glob("ports/*/state"))
    states = [port.read_text().partition(":")[2].strip().lower() for port in ports]
    if states:
        return "up" if "active" in states else states[0]
    if name not in (known for _, known in socket.if_nameindex()):
        return ""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        flags = _number(probe, name, _SIOCGIFFLAGS, "H")
    if not flags & _IFF_UP:
        return "down"
    return "up" if flags & _IFF_RUNNING else "no carrier"


def _number(probe: socket.socket, name: str, request: int, form: str) -> int:
    """What an ioctl about an interface answers; 0 if it does not."""
    asked = struct.pack("16s24x", name.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), request, asked)
    except OSError:
        return 0
    return int(struct.unpack_from(form, answer, 16)[0])


def _megabits(probe: socket.socket, name: str) -> int:
    """The rate that the driver states (``struct ethtool_cmd``); 0 if it states none."""
    command = array.array("B", struct.pack("I40x", _ETHTOOL_GSET))
    request = struct.pack("16sP", name.encode(), command.buffer_info()[0]).ljust(40, b"\0")
    try:
        fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, request)
    except OSError:
        return 0
    # u16 speed at byte 12, u16 speed_hi at byte 28.
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    speed = high << 16 | low
    return 0 if speed in _UNKNOWN_SPEEDS else speed


def _rate(megabits: int) -> str:
    if not megabits:
        return "rate not stated"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"
