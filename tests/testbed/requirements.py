"""Checks whether a testbed is possible on this machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}

# Makes every kind of object that a testbed consists of once, and prints the first that fails.
_TRIAL = """
try() { what=$1; shift; "$@" >/dev/null 2>&1 || { echo "$what"; exit 1; }; }
try sysfs mount -t sysfs sysfs /sys
try tmpfs mount -t tmpfs tmpfs /dev/shm
try bridge "$0" link add br0 type bridge
try veth "$0" link add left type veth peer name right
try sch_tbf "$1" qdisc add dev left root tbf rate 1gbit burst 64k limit 64k
"""

_PRIVILEGED = "run on a machine or in a container that permits it (docker run --privileged)"


def tool(name: str) -> str:
    """The path of a program, also if PATH lacks the folders of root's programs."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise FileNotFoundError(f"{name} is missing: install {TOOLS.get(name, name)}")
    return found


@functools.cache
def missing() -> str | None:
    """None, or a sentence that says why a testbed cannot run here and what to do."""
    if not sys.platform.startswith("linux"):
        return "the testbed needs Linux namespaces; run it on Linux"
    if os.geteuid() != 0:
        return "the testbed makes network namespaces and needs root; run it as root (sudo)"
    for name in TOOLS:
        try:
            tool(name)
        except FileNotFoundError as error:
            return f"{error} (make setup does)"
    command = [tool("unshare"), "--net", "--uts", "--mount"]
    trial = [*command, "sh", "-c", _TRIAL, tool("ip"), tool("tc")]
    result = subprocess.run(trial, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    failed = result.stdout.strip()
    if not failed:
        reason = result.stderr.strip() or f"status {result.returncode}"
        return f"this process may not make namespaces ({reason}); {_PRIVILEGED}"
    if failed in ("sysfs", "tmpfs"):
        return f"this process may not mount {failed} in a namespace of its own; {_PRIVILEGED}"
    return (
        f"the kernel offers no {failed} here; load the module (modprobe {failed})"
        " or use a kernel that has it"
    )
