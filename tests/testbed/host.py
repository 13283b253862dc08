"""One host of a testbed, as seen by the process that owns the testbed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import TestbedError
from .requirements import tool

PORT = 29500  # every port is free on a new host

# Run by sh on the host: $0 is the pid that must be alive, $1 the folder. The check notices a
# starting process that died before the new process was on the host, where the supervisor finds it.
_ENTER = '[ "$PPID" = "$0" ] && cd "$1" && shift && exec "$@"'


class Host:
    """A host: its name, its addresses, and methods that start processes on it.

    ``addresses`` has one IPv4 address per NIC, ``interfaces`` the names of the NICs. ``pid`` is the
    process that holds the host's namespaces: ``nsenter -t <pid> -n -u -m`` enters the host.
    """

    def __init__(
        self, index: int, name: str, addresses: list[str], interfaces: list[str], pid: int
    ) -> None:
        self.index = index
        self.name = name
        self.addresses = addresses
        self.interfaces = interfaces
        self.pid = pid
        self.first_address = addresses[0]  # the testbed sets it to the first host's
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
            "MASTER_ADDR": self.first_address,
            "MASTER_PORT": str(PORT),
        }

    def _environment(self, env: Mapping[str, str | None] | None) -> dict[str, str]:
        # A caller that passes all of os.environ does not mean to replace the host's variables by
        # this machine's: entries that equal os.environ are ignored.
        given = {k: v for k, v in (env or {}).items() if v is None or os.environ.get(k) != v}
        merged = {**os.environ, **self.environment, **given, "SMDDP_HOST_ID": self.name}
        return {name: value for name, value in merged.items() if value is not None}

    def read_net(self, name: str) -> str:
        """The host's /proc/net/``name``."""
        if self.closed:
            raise TestbedError("the testbed is closed")
        return Path(f"/proc/{self.pid}/net/{name}").read_text()

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
        if self.closed:
            raise TestbedError("the testbed is closed")
        environment = self._environment(env)
        folder = os.path.abspath(cwd or ".")
        program = os.fspath(argv[0])
        found = os.path.join(folder, program) if os.sep in program else program
        if shutil.which(found, path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"{program}: no such program")
        enter = [tool("nsenter"), "-t", str(self.pid), "--net", "--uts", "--mount", "--"]
        shell = ["/bin/sh", "-c", _ENTER, str(os.getpid()), folder]
        return subprocess.Popen([*enter, *shell, *argv], env=environment, cwd=cwd, **kw)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str | None] | None = None,
        *,
        input: Any = None,
        timeout: float | None = None,
        check: bool = False,
        capture_output: bool = False,
        **kw: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` on this host; ``env`` as in ``popen``, ``timeout`` in seconds."""
        if input is not None:
            kw["stdin"] = subprocess.PIPE
        if capture_output:
            kw["stdout"] = kw["stderr"] = subprocess.PIPE
        with self.popen(argv, env, **kw) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:  # also Ctrl-C: the process must not outlive this call
                process.kill()
                raise
        result = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check:
            result.check_returncode()
        return result
