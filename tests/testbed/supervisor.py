"""The process that holds a testbed's namespaces and ends everything in them.

The namespaces have no names: they exist while a process is in them. The supervisor is in the
namespace of the switch (a network namespace for the bridges) and starts one holder process per
host. It ends when its owner tells it to, or when its owner dies by any signal. It then kills every
process on the hosts, however that process was started there, then the holders, then itself, and the
kernel removes what they held.

The owner runs this file by its path, with the standard library alone. The single argument is a JSON
object: ``owner`` (pid), ``hosts`` (names), ``hosts_file`` (text of /etc/hosts). The answer is one
line on standard output, ``{"hosts": [pid, ...]}`` or ``{"error": "..."}``. After that, a byte on
standard input, or the end of standard input, tells the supervisor to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

# Written in this order, so that the settings of the machine that runs the testbed do not change
# what is measured on it. The kernel refuses cubic to a network namespace if the machine's own
# default is another algorithm; reno behaves like cubic at the round-trip times of one switch.
SYSCTLS = (
    ("net/ipv4/tcp_congestion_control", "reno"),
    ("net/ipv4/tcp_congestion_control", "cubic"),
    # As on a tuned cluster: a connection that was idle keeps its congestion window.
    ("net/ipv4/tcp_slow_start_after_idle", "0"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
)


class Libc:
    """The system calls that Python 3.10 lacks; each raises OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def unshare(self, flags: int) -> None:
        """Move this process into new namespaces."""
        self._check(self._libc.unshare(flags), "unshare")

    def mount(self, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        """See mount(2)."""
        arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags))
        self._check(self._libc.mount(*arguments, data.encode()), f"mount on {target}")

    def die_with_parent(self) -> None:
        """Let the kernel kill this process when its parent, a process with one thread, dies."""
        self._check(self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def network_of(pid: int) -> int | None:
    """The inode of the process's network namespace; None if the process has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def processes_in(networks: Collection[int], spared: Collection[int]) -> list[int]:
    """Every process whose network namespace is one of ``networks``, except those in ``spared``."""
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in found if pid not in spared and network_of(pid) in networks]


def kill_processes_in(
    networks: Collection[int], spared: Collection[int], timeout: float = 10.0
) -> list[int]:
    """Kill until no process is left in ``networks``, for at most ``timeout`` seconds.

    Returns the processes that are left. Children that a process forks meanwhile are found in the
    next pass.
    """
    end = time.monotonic() + timeout
    while (left := processes_in(networks, spared)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return left


def own_sysfs(libc: Libc) -> None:
    """Mount a /sys that shows this network namespace's interfaces; control groups stay mounted."""
    try:
        cgroup = os.open("/sys/fs/cgroup", os.O_PATH | os.O_DIRECTORY)
    except OSError:
        cgroup = -1
    libc.mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if cgroup >= 0:
        with contextlib.suppress(OSError):
            libc.mount(f"/proc/self/fd/{cgroup}", "/sys/fs/cgroup", "", MS_BIND | MS_REC)
        os.close(cgroup)


def own_shared_memory(libc: Libc, hosts_file: str) -> None:
    """Mount this host's own /dev/shm and /etc/hosts; the latter is an unlinked file."""
    libc.mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    file = Path("/dev/shm/hosts")
    file.write_text(hosts_file)
    with contextlib.suppress(OSError):  # a system without /etc/hosts
        libc.mount(str(file), "/etc/hosts", "", MS_BIND)
    file.unlink()


def set_sysctls() -> None:
    """Write ``SYSCTLS``; a setting that the kernel or a container refuses keeps its value."""
    for name, value in SYSCTLS:
        with contextlib.suppress(OSError):
            Path("/proc/sys", name).write_text(value)


def become_host(libc: Libc, name: str, hosts_file: str) -> None:
    """Move this process into new namespaces and set them up as the host ``name``."""
    libc.unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
    libc.mount("none", "/", "", MS_REC | MS_PRIVATE)
    socket.sethostname(name)
    own_sysfs(libc)
    own_shared_memory(libc, hosts_file)
    set_sysctls()


def start_holder(libc: Libc, name: str, hosts_file: str) -> tuple[int, int]:
    """Start the process that holds the namespaces of the host ``name``; it only sleeps.

    Returns its pid and a descriptor from which one line can be read once the host is set up: an
    empty line, or the error.
    """
    supervisor = os.getpid()
    ready, report = os.pipe()
    pid = os.fork()
    if pid:
        os.close(report)
        return pid, ready
    try:
        libc.die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)
        become_host(libc, name, hosts_file)
        os.write(report, b"\n")
        # The holder keeps no descriptor of the owner open: the owner's pipes must reach their end
        # when the owner closes them.
        os.closerange(0, 1024)
        while True:
            signal.pause()
    except BaseException as error:
        os.write(report, f"{error}\n".encode())
    os._exit(1)


def start_holders(libc: Libc, names: list[str], hosts_file: str) -> list[int]:
    """Start all hosts' holders; returns their pids once all hosts are set up."""
    started = [start_holder(libc, name, hosts_file) for name in names]
    for (_, ready), name in zip(started, names, strict=True):
        with os.fdopen(ready) as pipe:
            answer = pipe.readline()
        if answer != "\n":
            raise OSError(f"{name}: {answer.strip() or 'its holder died'}")
    return [pid for pid, _ in started]


def wait_for_end(owner: int) -> None:
    """Wait until the owner tells this process to end, or dies."""
    watched: list[int] = [0, os.pidfd_open(owner)]
    # Otherwise the owner died before the line above, and its pid may belong to another process.
    if os.getppid() == owner:
        select.select(watched, [], [])


def main() -> None:
    """See the docstring of this module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    libc = Libc()
    try:
        libc.unshare(CLONE_NEWNET)
        set_sysctls()
        holders = start_holders(libc, order["hosts"], order["hosts_file"])
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    networks = {network_of(pid) for pid in (os.getpid(), *holders)} - {None}
    with contextlib.suppress(OSError):
        print(json.dumps({"hosts": holders}), flush=True)
        wait_for_end(order["owner"])
    spared = {os.getpid(), *holders}
    kill_processes_in({number for number in networks if number is not None}, spared)
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    for pid in holders:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
