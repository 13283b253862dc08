"""The machine of one rank: processor, memory, limits, NUMA placement, network interfaces."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepspeed_smddp.config.units import rate_text, size_text
from deepspeed_smddp.diagnostics.doctor.facts import Fact, Finding, limited

# Docker gives a container 64 MiB of /dev/shm unless `--shm-size` says otherwise.
LEAST_SHARED_MEMORY = 1 << 30  # bytes
LEAST_DESCRIPTORS = 1024
# An RDMA provider locks the memory that it registers.
LEAST_LOCKED_MEMORY = 16 << 30  # bytes

_NVIDIA = "0x10de"


def machine_facts(sysfs: Path = Path("/sys")) -> Iterator[Fact]:
    """The facts of the machine, and of the limits under which this process runs."""
    models = (line for line in _text(Path("/proc/cpuinfo")).splitlines() if "model name" in line)
    yield Fact("CPU", next(models, ": not known").partition(":")[2].strip())
    yield Fact("CPUs of the machine", str(os.cpu_count() or 0))
    yield Fact("CPUs of the rank", str(len(os.sched_getaffinity(0))))
    pages = os.sysconf("SC_PHYS_PAGES")
    yield Fact("memory", f"{os.sysconf('SC_PAGE_SIZE') * pages / 2**30:.0f} GiB")
    yield Fact("/dev/shm", size_text(_shared_memory()[0]))
    yield Fact("locked-memory limit", _limit(resource.RLIMIT_MEMLOCK, size_text))
    yield Fact("descriptor limit", _limit(resource.RLIMIT_NOFILE, str))
    yield Fact("process limit", _limit(resource.RLIMIT_NPROC, str))
    yield Fact("NUMA nodes", str(len(_numa_nodes(sysfs)) or 1))
    yield Fact("NUMA nodes of the rank", _joined(rank_numa_nodes(sysfs)), scope="own")
    at = _gpu_of_rank(sysfs)[1]
    near = [name for name, node in _nics(sysfs).items() if node == at >= 0]
    yield Fact("NICs near the GPU", ", ".join(near) or "none", scope="own")
    swaps = _text(Path("/proc/swaps")).splitlines()
    yield Fact("swap in use", "yes" if len(swaps) > 1 else "no")


def machine_findings(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """What limits this rank, whatever the others have."""
    total, free = _shared_memory()
    if free < LEAST_SHARED_MEMORY:
        yield limited(
            "/dev/shm",
            f"{size_text(free)} of {size_text(total)} are free, and torch, NCCL and MPI want at "
            f"least {size_text(LEAST_SHARED_MEMORY)}: in a container, start it with --shm-size or "
            "--ipc=host",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        yield limited(
            "descriptor limit",
            f"{soft} open files (up to {hard} allowed): a group of many ranks needs more; "
            "`ulimit -n 65536`",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = _nics(sysfs)
    if rdma and locked != resource.RLIM_INFINITY and locked < LEAST_LOCKED_MEMORY:
        yield limited(
            "locked-memory limit",
            f"{size_text(locked)}, but {_joined(rdma)} registers memory: `ulimit -l unlimited`",
        )
    yield from _placement(sysfs)


def rank_numa_nodes(sysfs: Path = Path("/sys")) -> list[int]:
    """The NUMA nodes of the CPUs that this process may use."""
    allowed = os.sched_getaffinity(0)
    return [node for node, cpus in _numa_nodes(sysfs).items() if cpus & allowed]


def _placement(sysfs: Path) -> Iterator[Finding]:
    """GPUs and RDMA NICs of a NUMA node from which this rank may not run, or apart."""
    own, every = rank_numa_nodes(sysfs), _numa_nodes(sysfs)
    bound = len(every) > 1 and len(own) < len(every)
    gpu, at = _gpu_of_rank(sysfs)
    nics = {name: node for name, node in _nics(sysfs).items() if node >= 0}
    if bound and at >= 0 and at not in own:
        yield limited(
            "GPU affinity",
            f"the rank runs on NUMA node {_joined(own)}, its GPU {gpu} is at {at}: "
            f"start it with `numactl --cpunodebind={at}`",
        )
    if nics and bound and not set(nics.values()) & set(own):
        yield limited(
            "NIC affinity",
            f"the rank runs on NUMA node {_joined(own)}; its host's NICs "
            f"({_joined(nics)}) are at other nodes",
        )
    # The data of such a GPU cross between sockets.
    if nics and at >= 0 and at not in nics.values():
        yield limited(
            "NICs of the GPU",
            f"GPU {gpu} is at NUMA node {at}, which has no NIC; those of the "
            f"host ({_joined(nics)}) are at other nodes",
        )


def _nics(sysfs: Path) -> dict[str, int]:
    """The RDMA devices with their NUMA nodes, -1 where it is not known."""
    devices = sorted((sysfs / "class/infiniband").glob("*"))
    return {device.name: _numa_node(device / "device") for device in devices}


def _gpu_of_rank(sysfs: Path) -> tuple[str, int]:
    """The PCI address of the GPU with this rank's local number, and its NUMA node; -1: unknown."""
    devices = sysfs / "bus/pci/devices"
    gpus = [
        device
        for device in sorted(devices.glob("*"))
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith("0x03")
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    listed = [int(part) for part in visible if part.isdigit()] or range(len(gpus))
    try:
        gpu = gpus[listed[int(os.environ.get("LOCAL_RANK", ""))]]
    except (IndexError, ValueError):
        return "", -1
    return gpu.name, _numa_node(gpu)


def _numa_nodes(sysfs: Path) -> dict[int, set[int]]:
    """The CPUs of each NUMA node."""
    found = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        found[int(folder.name[4:])] = _cpus(_text(folder / "cpulist"))
    return {node: cpus for node, cpus in sorted(found.items()) if cpus}


def _cpus(text: str) -> set[int]:
    """``{0, 1, 2, 8}`` of the kernel's ``0-2,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _numa_node(device: Path) -> int:
    text = _text(device / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


def _shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm: all, and free ones."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _limit(which: int, show: Callable[[int], str]) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else show(soft)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "-"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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


def network_facts(sysfs: Path = Path("/sys")) -> Iterator[Fact]:
    """Rates and MTUs of the interfaces, and the RDMA devices with theirs."""
    found = interfaces()
    chosen = os.environ.get("SMDDP_FABRIC_INTERFACE", "")
    used = [interface for interface in found if _is_chosen(interface.name, found, chosen)] or found
    names = ", ".join(i.name for i in used)
    rates = [rate_text(i.megabits * 1e6 / 8) if i.megabits else "rate not stated" for i in used]
    yield Fact("NICs", ", ".join(sorted(rates)) or "none", detail=names)
    yield Fact("MTU", ", ".join(sorted({str(i.mtu) for i in used})) or "none")
    yield Fact("RDMA devices", ", ".join(rdma_devices(sysfs)) or "none")


def _is_chosen(name: str, found: list[Interface], chosen: str) -> bool:
    """By ``SMDDP_FABRIC_INTERFACE``, as ``csrc/transport/ofi/offer.cc`` reads it."""
    items = [item for item in chosen.removeprefix("^").split(",") if item]
    if chosen.startswith("^"):
        return not name.startswith(tuple(items))
    names = {interface.name for interface in found}
    return any(name == item if item in names else name.startswith(item) for item in items)


def network_findings(provider: str, sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """A fast network that is there and that ``provider`` (libfabric's name) does not use."""
    devices = rdma_devices(sysfs)
    efa = [device for device in devices if "efa" in device]
    if efa and "efa" not in provider:
        yield limited(
            "EFA",
            f"present ({len(efa)} device{'s' if len(efa) > 1 else ''}) but not used: libfabric's "
            f"provider is {provider or 'none'}. Install AWS's EFA software, whose libfabric in "
            "/opt/amazon/efa has the provider efa, and unset SMDDP_FABRIC_PROVIDER and FI_PROVIDER",
        )
    elif devices and not efa and not ("verbs" in provider or "efa" in provider):
        yield limited(
            "RDMA",
            f"present ({', '.join(devices)}) but not used: libfabric's provider is "
            f"{provider or 'none'}; a libfabric with the provider verbs would use it",
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


def rate_of(names: list[str], sysfs: Path = Path("/sys")) -> float:
    """Bytes per second of these network interfaces or RDMA devices; 0 if one is not known."""
    megabits = {i.name: float(i.megabits) for i in interfaces()}
    for device in rdma_devices(sysfs):
        stated = re.search(r"(\S+) .*?([0-9.]+) Gb/sec", device)
        if stated:
            megabits[stated[1]] = 1000 * float(stated[2])
    # A provider names a device's domain, such as rdmap0s6-rdm of rdmap0s6.
    rates = [megabits.get(name) or megabits.get(name.rpartition("-")[0], 0.0) for name in names]
    return sum(rates) * 1e6 / 8 if all(rates) else 0.0


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
