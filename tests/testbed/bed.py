"""The testbed: hosts, the links between them, and operations on both."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from . import links, requirements, supervisor
from .errors import TestbedError
from .host import Host

Counters = dict[str, int]


class Testbed:
    """``hosts`` hosts on one machine, joined by one switch per NIC.

    ``rate`` is the rate of each link in each direction ("1gbit", or bits per second); ``mtu`` is in
    bytes. Every testbed has its own namespaces: several testbeds at once have equal names and
    addresses and do not reach each other. ``close``, leaving the ``with`` block, and the death of
    this process by any signal end every process on the hosts and leave nothing behind. Needs root:
    see ``missing``.
    """

    __test__ = False  # not a test case, although the name starts with Test

    def __init__(
        self, hosts: int = 2, rate: str | float = "1gbit", nics: int = 1, mtu: int = 1500
    ) -> None:
        self.plan = links.Plan(hosts, nics, mtu)
        bits = links.parse_rate(rate)
        reason = requirements.missing()
        if reason:
            raise TestbedError(reason)
        self.rates = [[bits] * nics for _ in range(hosts)]  # bits per second, [host][nic]
        self.hosts: list[Host] = []
        self._networks: set[int] = set()  # inodes of the namespaces of the hosts and the switch
        self._owner = os.getpid()
        self._closed = False
        self._supervisor = self._start_supervisor()
        try:
            self._build(self._answer())
        except BaseException:
            self.close()
            raise

    missing = staticmethod(requirements.missing)

    # --- building ---------------------------------------------------------------------------------

    def _start_supervisor(self) -> subprocess.Popen[str]:
        names = [self.plan.host(host) for host in range(self.plan.hosts)]
        order = {"owner": self._owner, "hosts": names, "hosts_file": self.plan.hosts_file()}
        # In its own session: the owner handles a Ctrl-C at the terminal.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def _answer(self) -> list[int]:
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the supervisor died"}
        if "error" in answer:
            raise TestbedError(f"the testbed's namespaces could not be made: {answer['error']}")
        pids: list[int] = answer["hosts"]
        return pids

    def _build(self, holders: list[int]) -> None:
        plan = self.plan
        for index, pid in enumerate(holders):
            addresses = [plan.address(index, nic) for nic in range(plan.nics)]
            interfaces = [plan.device(nic) for nic in range(plan.nics)]
            host = Host(index, plan.host(index), addresses, interfaces, pid)
            host.first_address = plan.address(0, 0)
            self.hosts.append(host)
        pids = [self._supervisor.pid, *holders]
        self._networks = {net for pid in pids if (net := supervisor.network_of(pid)) is not None}
        self._ip(self._supervisor.pid, links.switch_links(plan, holders))
        ports = []
        for host, rates in zip(self.hosts, self.rates, strict=True):
            self._ip(host.pid, links.host_links(plan, host.index))
            self._tc(host.pid, "\n".join(links.shape_host(plan, rates)))
            ports += links.shape_ports(plan, host.index, rates)
        self._tc(self._supervisor.pid, "\n".join(ports))

    def _inside(self, pid: int, argv: list[str], text: str | None = None) -> str:
        if self._closed:  # the pid may belong to another process now
            raise TestbedError("the testbed is closed")
        command = [requirements.tool("nsenter"), "-t", str(pid), "--net", "--", *argv]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise TestbedError(f"{Path(argv[0]).name}: {result.stderr.strip()}")
        return result.stdout

    def _ip(self, pid: int, lines: str) -> None:
        self._inside(pid, [requirements.tool("ip"), "-batch", "-"], lines + "\n")

    def _tc(self, pid: int, lines: str) -> None:
        self._inside(pid, [requirements.tool("tc"), "-batch", "-"], lines + "\n")

    # --- operations on links ----------------------------------------------------------------------

    def set_rate(self, host: int, nic: int, rate: str | float) -> None:
        """Set the rate of this link in each direction; queued packets stay queued."""
        bits = links.parse_rate(rate)
        rates = [*self.rates[host]]
        rates[nic] = bits
        self._tc(self.hosts[host].pid, links.shape_host(self.plan, rates, "change")[nic])
        self._tc(self._supervisor.pid, links.shape_ports(self.plan, host, rates, "change")[nic])
        self.rates[host] = rates

    def cut(self, host: int, nic: int) -> None:
        """Take the link down: the host's NIC loses its carrier, packets on the way are lost."""
        self._ip(self._supervisor.pid, f"link set {self.plan.port(host, nic)} down")

    def restore(self, host: int, nic: int) -> None:
        """Bring a cut link up again."""
        self._ip(self._supervisor.pid, f"link set {self.plan.port(host, nic)} up")

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
        return [found[self.plan.device(nic)] for nic in range(self.plan.nics)]

    def drops(self, host: int) -> list[dict[str, Counters]]:
        """Counters of the shapers, per NIC and direction.

        The directions are ``"egress"`` (what the host sends) and ``"ingress"``. Each has ``drops``
        (packets), ``overlimits`` (times a packet had to wait), ``backlog`` (bytes queued now),
        ``bytes`` and ``packets`` (forwarded frames with their headers).
        """
        ends = {
            "egress": (self.hosts[host].pid, self.plan.device),
            "ingress": (self._supervisor.pid, lambda nic: self.plan.port(host, nic)),
        }
        answer: list[dict[str, Counters]] = [{} for _ in range(self.plan.nics)]
        for direction, (pid, name) in ends.items():
            text = self._inside(pid, [requirements.tool("tc"), "-s", "-j", "qdisc", "show"])
            rows = {row["dev"]: row for row in json.loads(text) if row["kind"] == "tbf"}
            for nic in range(self.plan.nics):
                row = rows[name(nic)]
                kept = ("drops", "overlimits", "backlog", "bytes", "packets")
                answer[nic][direction] = {key: int(row[key]) for key in kept}
        return answer

    # --- shutdown ---------------------------------------------------------------------------------

    def end_processes(self) -> None:
        """Kill every process on the hosts, however it was started; the hosts stay."""
        holders = [self._supervisor.pid, *(host.pid for host in self.hosts)]
        if not self._closed:
            supervisor.kill_processes_in(self._networks, holders)

    def close(self) -> None:
        """End every process on the hosts, then the hosts. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child does not own the testbed
            return
        self._closed = True
        for host in self.hosts:
            host.closed = True
        pipe = self._supervisor.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write("\n")  # closing alone is not enough: a forked child may hold a copy
            pipe.flush()
        self._supervisor.wait()
        for stream in (pipe, self._supervisor.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
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
