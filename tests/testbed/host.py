"""One host of a testbed, as seen by the process that owns the testbed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PORT = 29500  # every port is free on a new host
# With the folders of root's programs.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])

# Run by sh on the host: $0 is the pid that must be alive, $1 the folder. The check notices a
# starting process that died before the new process was on the host, where the supervisor finds it.
_ENTER = '[ "$PPID" = "$0" ] && cd "$1" && shift && exec "$@"'


class TestbedError(RuntimeError):
    """The testbed could not be built, used or changed; the message says what failed."""

    __test__ = False  # not a test case, although the name starts with Test


def tool(name: str) -> str:
    """The path of one of root's programs."""
    return shutil.which(name, path=PATH) or name


class Host:
    """A host: its name, its addresses, and methods that start processes on it.

    ``addresses`` has one IPv4 address per NIC, ``interfaces`` the names of the NICs, ``ports`` the
    switch's ends of their links. ``pid`` is the process that holds the host's namespaces:
    ``nsenter -t <pid> -n -u -m`` enters the host.
    """

    def __init__(self, index: int, nics: int) -> None:
        self.index = index
        self.name = f"host{index}"
        self.addresses = [f"10.77.{nic}.{index + 1}" for nic in range(nics)]
        self.interfaces = [f"eth{nic}" for nic in range(nics)]
        self.ports = [f"h{index}n{nic}" for nic in range(nics)]
        self.pid = 0
        self.closed = False  # once closed, the pid may belong to another process

    def __repr__(self) -> str:
        return f"Host({self.name}, {', '.join(self.addresses)})"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that each process on this host finds set: the host's name and its NICs."""
        return {
            "SMDDP_HOST_ID": self.name,
            "SMDDP_FABRIC_INTERFACE": ",".join(self.interfaces),
            "GLOO_SOCKET_IFNAME": self.interfaces[0],
            "MASTER_ADDR": "10.77.0.1",  # the first host
            "MASTER_PORT": str(PORT),
        }

    def read_net(self, name: str) -> str:
        """The host's /proc/net/``name``."""
        if self.closed:
            raise TestbedError("the testbed is closed")
        return Path(f"/proc/{self.pid}/net/{name}").read_text()

    def _call(
        self,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str | None] | None,
        cwd: str | os.PathLike[str] | None,
    ) -> dict[str, Any]:
        """What ``subprocess`` needs to start a process on this host."""
        if self.closed:
            raise TestbedError("the testbed is closed")
        # A caller that passes all of os.environ does not mean to replace the host's variables by
        # this machine's: entries that equal os.environ are ignored.
        given = {k: v for k, v in (env or {}).items() if v is None or os.environ.get(k) != v}
        merged = {**os.environ, **self.environment, **given, "SMDDP_HOST_ID": self.name}
        environment = {name: value for name, value in merged.items() if value is not None}
        folder = os.path.abspath(cwd or ".")
        program = os.fspath(argv[0])
        found = os.path.join(folder, program) if os.sep in program else program
        if shutil.which(found, path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"{program}: no such program")
        enter = [tool("nsenter"), "-t", str(self.pid), "--net", "--uts", "--mount", "--"]
        shell = ["/bin/sh", "-c", _ENTER, str(os.getpid()), folder]
        return {"args": [*enter, *shell, *argv], "env": environment, "cwd": cwd}

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str | None] | None = None,
        *,
        cwd: str | os.PathLike[str] | None = None,
        **kw: Any,
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` on this host; the process dies with the testbed.

        ``env`` overrides this process's environment and ``environment``; a value of None unsets a
        variable. SMDDP_HOST_ID is always the host's. ``cwd`` and ``kw`` are as in
        ``subprocess.Popen``.
        """
        return subprocess.Popen(**self._call(argv, env, cwd), **kw)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str | None] | None = None,
        *,
        cwd: str | os.PathLike[str] | None = None,
        **kw: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` on this host; ``env`` as in ``popen``."""
        return subprocess.run(**self._call(argv, env, cwd), **kw)
