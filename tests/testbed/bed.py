"""The testbed: hosts, their cables, and what one does to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from . import links, requirements, warden
from .errors import TestbedError
from .host import Host

Counters = dict[str, int]


class Testbed:
    """``hosts`` hosts on one machine, joined by one switch per NIC.

    ``rate`` is what each link carries each way ("1gbit", or bits per second), ``mtu`` in bytes.
    Every testbed has namespaces of its own: several at once have equal names and addresses and do
    not meet. ``close``, leaving the ``with`` block, and the death of this process, by whatever
    signal, end every process on the hosts and leave nothing behind. Needs root: see ``missing``.
    """

    __test__ = False  # no test case, whatever pytest makes of the name

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
        self._networks: set[int] = set()  # inodes of the hosts' and the switch's
        self._owner = os.getpid()
        self._closed = False
        self._warden = self._start_warden()
        try:
            self._build(self._answer())
        except BaseException:
            self.close()
            raise

    missing = staticmethod(requirements.missing)

    # --- building ---------------------------------------------------------------------------------

    def _start_warden(self) -> subprocess.Popen[str]:
        names = [self.plan.host(host) for host in range(self.plan.hosts)]
        order = {"owner": self._owner, "hosts": names, "hosts_file": self.plan.hosts_file()}
        # In a session of its own: a Ctrl-C at the terminal is the owner's to handle.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", warden.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def _answer(self) -> list[int]:
        assert self._warden.stdout is not None
        line = self._warden.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the warden died"}
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
        pids = [self._warden.pid, *holders]
        self._networks = {net for pid in pids if (net := warden.network_of(pid)) is not None}
        self._ip(self._warden.pid, links.switch_links(plan, holders))
        ports = []
        for host, rates in zip(self.hosts, self.rates, strict=True):
            self._ip(host.pid, links.host_links(plan, host.index))
            self._tc(host.pid, "\n".join(links.shape_host(plan, rates)))
            ports += links.shape_ports(plan, host.index, rates)
        self._tc(self._warden.pid, "\n".join(ports))

    def _inside(self, pid: int, argv: list[str], text: str | None = None) -> str:
        if self._closed:  # the pid may be another process's by now
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

    # --- what one does to the cables --------------------------------------------------------------

    def set_rate(self, host: int, nic: int, rate: str | float) -> None:
        """From now on this link carries ``rate`` each way; what is queued stays queued."""
        bits = links.parse_rate(rate)
        rates = [*self.rates[host]]
        rates[nic] = bits
        self._tc(self.hosts[host].pid, links.shape_host(self.plan, rates, "change")[nic])
        self._tc(self._warden.pid, links.shape_ports(self.plan, host, rates, "change")[nic])
        self.rates[host] = rates

    def cut(self, host: int, nic: int) -> None:
        """Pull the cable: the host's NIC loses its carrier and what is under way is lost."""
        self._ip(self._warden.pid, f"link set {self.plan.port(host, nic)} down")

    def restore(self, host: int, nic: int) -> None:
        """Plug the cable in again."""
        self._ip(self._warden.pid, f"link set {self.plan.port(host, nic)} up")

    # --- what the kernel counted ------------------------------------------------------------------

    def counters(self, host: int) -> list[Counters]:
        """Per NIC ``tx_bytes``, ``rx_bytes``, ``tx_packets``, ``rx_packets``, seen by the host.

        They are the interface's own: Ethernet, IP and TCP headers are counted with the payload. A
        packet may be one of up to 64 KiB that stands for many frames (GSO), with one header.
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
        """Per NIC and direction, ``"egress"`` (what the host sends) and ``"ingress"``:

        ``drops`` (packets), ``overlimits`` (times a packet had to wait), ``backlog`` (bytes queued
        now), ``bytes`` and ``packets`` (frames with their headers) sent on.
        """
        ends = {
            "egress": (self.hosts[host].pid, self.plan.device),
            "ingress": (self._warden.pid, lambda nic: self.plan.port(host, nic)),
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

    # --- the end ----------------------------------------------------------------------------------

    def end_processes(self) -> None:
        """Kill every process on the hosts, whoever started it; the hosts stay."""
        holders = [self._warden.pid, *(host.pid for host in self.hosts)]
        if not self._closed:
            warden.kill_inhabitants(self._networks, holders)

    def close(self) -> None:
        """End every process on the hosts, then the hosts. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child owns nothing
            return
        self._closed = True
        for host in self.hosts:
            host.closed = True
        pipe = self._warden.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write("\n")  # more than closing it: a forked child may hold the other copy
            pipe.flush()
        self._warden.wait()
        for stream in (pipe, self._warden.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        # Had someone killed the warden, its hosts' processes would still be there.
        warden.kill_inhabitants(self._networks, ())

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
