"""The testbed: hosts, the links between them, and operations on both."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from . import links, supervisor
from .host import PATH, Host, TestbedError, tool

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
Counters = dict[str, int]


class Testbed:
    """``hosts`` hosts on one machine, joined by one switch per NIC.

    ``rate`` is the rate of each link in each direction, such as "1gbit"; ``mtu`` is in bytes. Every
    testbed has its own namespaces: several testbeds at once have equal names and addresses and do
    not reach each other. ``close``, leaving the ``with`` block, and the death of this process by
    any signal end every process on the hosts and leave nothing behind. Needs root: see ``missing``.
    """

    __test__ = False  # not a test case, although the name starts with Test

    def __init__(self, hosts: int = 2, rate: str = "1gbit", nics: int = 1, mtu: int = 1500) -> None:
        if os.geteuid() != 0:
            raise TestbedError("the testbed makes network namespaces: run it as root (sudo)")
        for name, package in TOOLS.items():
            if not os.path.exists(tool(name)):
                raise TestbedError(f"{name} is missing: install {package} (make setup does)")
        bits = links.parse_rate(rate)
        self.rates = [[bits] * nics for _ in range(hosts)]  # bits per second, [host][nic]
        self.hosts = [Host(index, nics) for index in range(hosts)]
        self.switch_addresses = [links.switch_address(nic) for nic in range(nics)]
        self._networks: set[int | None] = set()  # of the hosts and the switch: inodes
        self._owner = os.getpid()
        self._closed = False
        self._supervisor = self._start_supervisor()
        try:
            self._build(mtu)
        except BaseException:
            self.close()
            raise

    @staticmethod
    @functools.cache
    def missing() -> str | None:
        """None, or a sentence that says why a testbed cannot run here and what to do."""
        try:
            with Testbed(hosts=1):
                return None
        except TestbedError as error:
            return (
                f"{error}. It needs Linux with veth, bridge and sch_tbf, and the right to make "
                "namespaces and mounts (docker run --privileged)."
            )

    # --- building ---------------------------------------------------------------------------------

    def _start_supervisor(self) -> subprocess.Popen[str]:
        # ``host1`` is that host's first NIC, ``host1-eth1`` its second.
        lines = ["127.0.0.1 localhost"]
        for host in self.hosts:
            names = [host.name, *(f"{host.name}-{device}" for device in host.interfaces[1:])]
            lines += [f"{a} {name}" for a, name in zip(host.addresses, names, strict=True)]
        order = [str(self._owner), "\n".join([*lines, ""]), *(host.name for host in self.hosts)]
        # In its own session: the owner handles a Ctrl-C at the terminal.
        return subprocess.Popen(
            ["unshare", "--net", sys.executable, "-I", "-S", supervisor.__file__, *order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": PATH},
            cwd="/",
            start_new_session=True,
        )

    @property
    def switch_pid(self) -> int:
        """Holds the namespace of the switch, which has ``switch_addresses``, one per plane."""
        return self._supervisor.pid

    def _build(self, mtu: int) -> None:
        switch = self.switch_pid
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the supervisor died"}
        if "error" in answer:
            raise TestbedError(f"the testbed's namespaces can't be made: {answer['error']}")
        for host, pid in zip(self.hosts, answer["hosts"], strict=True):
            host.pid = pid
        self._networks = {supervisor.network_of(p) for p in (switch, *answer["hosts"])} - {None}
        self._batch(switch, "ip", *links.switch_links(self.hosts, mtu))
        for host in self.hosts:
            self._batch(host.pid, "ip", *links.host_links(host))
            for nic, rate in enumerate(self.rates[host.index]):
                self._shape(host, nic, rate, "add")

    def _inside(self, pid: int, *argv: str, text: str = "") -> str:
        if self._closed:  # the pid may belong to another process now
            raise TestbedError("the testbed is closed")
        command = [tool("nsenter"), "-t", str(pid), "--net", "--", tool(argv[0]), *argv[1:]]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise TestbedError(f"{argv[0]}: {result.stderr.strip()}")
        return result.stdout

    def _batch(self, pid: int, program: str, *lines: str) -> None:
        self._inside(pid, program, "-batch", "-", text="\n".join([*lines, ""]))

    def _shape(self, host: Host, nic: int, rate: int, verb: str, queue: int | None = None) -> None:
        self._batch(host.pid, "tc", links.shape_host(host, nic, rate, verb))
        self._batch(self.switch_pid, "tc", links.shape_port(host, nic, rate, verb, queue))

    # --- operations on links ----------------------------------------------------------------------

    def set_rate(self, host: int, nic: int, rate: str, queue: int | None = None) -> None:
        """Set the rate of this link in each direction; queued packets stay queued.

        ``queue`` is what the switch's port holds for the host, in bytes: a short one loses packets.
        """
        bits = links.parse_rate(rate)
        self._shape(self.hosts[host], nic, bits, "change", queue)
        self.rates[host][nic] = bits

    def cut(self, host: int, nic: int) -> None:
        """Take the link down: the host's NIC loses its carrier, packets on the way are lost."""
        self._batch(self.switch_pid, "ip", f"link set {self.hosts[host].ports[nic]} down")

    def restore(self, host: int, nic: int) -> None:
        """Bring a cut link up again. Returns once the host sees its carrier."""
        self._batch(self.switch_pid, "ip", f"link set {self.hosts[host].ports[nic]} up")
        device, until = self.hosts[host].interfaces[nic], time.monotonic() + 30
        while "state UP" not in self._inside(self.hosts[host].pid, "ip", "link", "show", device):
            if time.monotonic() > until:
                raise TestbedError(f"{device} of {self.hosts[host].name} has no carrier")
            time.sleep(0.01)

    # --- counters of the kernel -------------------------------------------------------------------

    def counters(self, host: int) -> list[Counters]:
        """Per NIC ``tx_bytes``, ``rx_bytes``, ``tx_packets``, ``rx_packets``, seen by the host.

        They are the counters of the interface: Ethernet, IP and TCP headers count with the payload.
        A packet may have up to 64 KiB and stand for many frames (GSO), with one header.
        """
        found: dict[str, Counters] = {}
        for line in self.hosts[host].read_net("dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            n = [int(number) for number in numbers.split()]
            found[name.strip()] = {
                "tx_bytes": n[8],
                "rx_bytes": n[0],
                "tx_packets": n[9],
                "rx_packets": n[1],
            }
        return [found[device] for device in self.hosts[host].interfaces]

    def drops(self, host: int) -> list[dict[str, dict[str, Any]]]:
        """Counters of the shapers, per NIC and direction: tc's rows.

        The directions are ``"egress"`` (what the host sends) and ``"ingress"``. Each has ``drops``
        (packets), ``overlimits`` (times a packet had to wait), ``backlog`` (bytes queued now),
        ``bytes`` and ``packets`` (forwarded frames with their headers).
        """
        rows: dict[str, dict[str, Any]] = {}
        for pid in (self.hosts[host].pid, self._supervisor.pid):
            text = self._inside(pid, "tc", "-s", "-j", "qdisc", "show")
            rows |= {row["dev"]: row for row in json.loads(text) if row["kind"] == "tbf"}
        ends = zip(self.hosts[host].interfaces, self.hosts[host].ports, strict=True)
        return [{"egress": rows[device], "ingress": rows[port]} for device, port in ends]

    # --- shutdown ---------------------------------------------------------------------------------

    def end_processes(self) -> None:
        """Kill every process on the hosts, however it was started; the hosts stay."""
        if not self._closed:
            holders = [self._supervisor.pid, *(host.pid for host in self.hosts)]
            supervisor.kill_processes_in(self._networks, holders)

    def close(self) -> None:
        """End every process on the hosts, then the hosts. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child does not own the testbed
            return
        self._closed = True
        for host in self.hosts:
            host.closed = True
        # Closing the pipe alone is not enough: a forked child may hold a copy.
        with contextlib.suppress(OSError):
            self._supervisor.communicate("\n")
        # If the supervisor was killed, the processes on its hosts are still there.
        supervisor.kill_processes_in(self._networks, ())

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
