"""The process that holds a testbed's namespaces and ends everything in them.

The namespaces have no names: they exist while a process is in them. The supervisor is in the
namespace of the switch (a network namespace for the bridges) and starts one holder process per
host. It ends when its owner tells it to, or when its owner dies by any signal. It then kills every
process on the hosts, however that process was started there, then the holders, then itself, and the
kernel removes what they held.

The owner runs this file by its path, with the standard library alone: ``supervisor.py OWNER
HOSTS_FILE NAME...`` with its pid, the text of /etc/hosts, and the hosts' names. The answer is one
line on standard output, ``{"hosts": [pid, ...]}`` or ``{"error": "..."}``. After that, a byte on
standard input, or the end of standard input, tells the supervisor to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection

# Written in this order, so that the settings of the machine that runs the testbed do not change
# what is measured on it. The kernel refuses cubic to a network namespace if the machine's own
# default is another algorithm; reno behaves like cubic at the round-trip times of one switch. As on
# a tuned cluster, a connection that was idle keeps its congestion window. What the kernel or a
# container refuses keeps its value.
SYSCTLS = """
cd /proc/sys/net
for setting in \\
    reno:ipv4/tcp_congestion_control cubic:ipv4/tcp_congestion_control \\
    0:ipv4/tcp_slow_start_after_idle 1:ipv6/conf/default/disable_ipv6; do
  { echo ${setting%%:*} > ${setting#*:}; } 2>/dev/null
done
cd /
"""
# Makes new namespaces the host $0, with a /sys that shows its interfaces, a /dev/shm of its own,
# and $1 as its /etc/hosts, an unlinked file. Then it only sleeps, without the owner's descriptors.
HOLDER = f"""
{SYSCTLS}
set -e
hostname "$0"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm
if [ -d /sys/fs/cgroup ]; then
  mkdir /dev/shm/cgroup
  mount --rbind /sys/fs/cgroup /dev/shm/cgroup
fi
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
if [ -d /dev/shm/cgroup ]; then
  mount --move /dev/shm/cgroup /sys/fs/cgroup
  rmdir /dev/shm/cgroup
fi
if [ -e /etc/hosts ]; then
  printf %s "$1" > /dev/shm/hosts
  mount --bind /dev/shm/hosts /etc/hosts
  rm /dev/shm/hosts
fi
echo ready
exec sleep infinity >/dev/null 2>&1
"""
# The kernel ends a holder with the supervisor.
HOLD = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "sh", "-c"]


def network_of(pid: int) -> int | None:
    """The inode of the process's network namespace; None if the process has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def processes_in(networks: Collection[int | None], spared: Collection[int]) -> list[int]:
    """Every process whose network namespace is one of ``networks``, except those in ``spared``."""
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in found if pid not in spared and network_of(pid) in networks]


def kill_processes_in(networks: Collection[int | None], spared: Collection[int]) -> None:
    """Kill until no process is left in ``networks``, for at most ten seconds.

    Children that a process forks meanwhile are found in the next pass.
    """
    end = time.monotonic() + 10
    while (left := processes_in(networks, spared)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def wait_for_end(owner: int) -> None:
    """Wait until the owner tells this process to end, or dies."""
    watched: list[int] = [0, os.pidfd_open(owner)]
    # Otherwise the owner died before the line above, and its pid may belong to another process.
    if os.getppid() == owner:
        select.select(watched, [], [])


def main(owner: int, hosts_file: str, *names: str) -> None:
    """See the docstring of this module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    subprocess.run(["sh", "-c", SYSCTLS], check=False)
    holders = [
        subprocess.Popen(
            [*HOLD, HOLDER, name, hosts_file],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    ]
    answer: dict[str, object] = {"hosts": [holder.pid for holder in holders]}
    for holder, name in zip(holders, names, strict=True):
        assert holder.stdout is not None
        said = holder.stdout.read().strip()
        if said != "ready":
            answer = {"error": f"{name}: {said or 'its holder died'}"}
    pids = [os.getpid(), *(holder.pid for holder in holders)]
    networks = {network_of(pid) for pid in pids} - {None}
    with contextlib.suppress(OSError):
        print(json.dumps(answer), flush=True)
        wait_for_end(owner)
    kill_processes_in(networks, pids)
    for holder in holders:
        holder.kill()
    for holder in holders:
        holder.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
