"""Links and switches: the input of `ip` and `tc`.

A host's NIC j is ``eth<j>``, one end of a veth pair; the other end is a port of the bridge
``br<j>`` in the namespace of the switch. NIC j of all hosts is plane j, which has its own subnet
and bridge. A link is shaped where packets leave: at the host's end for what the host sends, at the
port for what the host receives.

Shaping is `tbf`, a token bucket before a queue that drops at its tail, as a switch's port does.
`python -m tests.testbed ceiling` measures the throughput that the constants below result in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# All in bytes.
#
# GSO is the largest TCP payload that the kernel gives to a NIC as one packet; the packet passes the
# shapers whole. The shaper itself would cut a packet larger than BURST into frames: on two cores at
# 1 Gbit/s this costs a third to two thirds of the throughput, and TCP takes frames that the cores
# deliver out of order for lost ones.
#
# BURST is the amount that an idle link passes at once, faster than its rate. With a smaller BURST
# short transfers take a more realistic time (40 KiB are a third of a millisecond at 1 Gbit/s).
# BURST holds one packet with the headers of its frames, 34 KiB, and what the link would carry while
# the shaper's timer is late. Measured with GSO and BURST at 1 Gbit/s in both directions, 2 and 4
# hosts on two busy cores, as a share of the rate: 95.4 % with 32 and 40 KiB, 94.9 to 95.2 % with 16
# and 20 KiB, 90 to 92 % with 16 and 18 KiB, 45 to 95 % with 8 KiB and more packets than the cores
# can carry; 95.5 % with 64 and 72 KiB.
GSO = 32 << 10
BURST = 40 << 10

# A switch's port queues 8 ms of traffic for its host, within these bounds, and drops the rest. 1
# MiB, almost reached at 1 Gbit/s, is the buffer that a data centre's switch with tens of MiB for
# all ports leaves to a busy port. With 1 MiB at 100 Mbit/s, round trips under load take 80 ms, and
# a flow that lost packets stayed below its share for more than a second (observed).
PORT_QUEUE_SECONDS = 0.008
PORT_QUEUE_LEAST = 256 << 10
PORT_QUEUE_MOST = 1 << 20

# A host drops no packets before its own NIC: TCP has to wait instead.
HOST_QUEUE = 64 << 20

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(rate: str | float) -> int:
    """Bits per second, from "1gbit", "2.5gbit", "100mbit", "64kbit" or bits per second."""
    if isinstance(rate, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmg]?bit)?\s*", rate.lower())
        try:
            value = float(match[1]) * _UNITS[match[2] or "bit"] if match else 0.0
        except ValueError:
            value = 0.0
    else:
        value = float(rate)
    if not 8000 <= value <= 1e12:
        raise ValueError(
            f"rate {rate!r}: write it as 1gbit, 100mbit or bits per second (at least 8000)"
        )
    return int(value)


@dataclass(frozen=True)
class Plan:
    """Number and names of hosts and NICs. ``mtu`` is in bytes."""

    hosts: int
    nics: int
    mtu: int

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("hosts", self.hosts, 1, 250),
            ("nics", self.nics, 1, 16),
            ("mtu", self.mtu, 576, 9216),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be from {low} to {high}")

    def host(self, host: int) -> str:
        """The host's name."""
        return f"host{host}"

    def address(self, host: int, nic: int) -> str:
        """The IPv4 address of a host's NIC."""
        return f"10.77.{nic}.{host + 1}"

    def device(self, nic: int) -> str:
        """The name of a NIC on its host."""
        return f"eth{nic}"

    def port(self, host: int, nic: int) -> str:
        """The name of the switch's end of a link."""
        return f"h{host}n{nic}"

    def hosts_file(self) -> str:
        """Text of /etc/hosts: ``host1`` is that host's first NIC, ``host1-eth1`` its second."""
        lines = ["127.0.0.1 localhost"]
        for host in range(self.hosts):
            for nic in range(self.nics):
                name = self.host(host) if nic == 0 else f"{self.host(host)}-{self.device(nic)}"
                lines.append(f"{self.address(host, nic)} {name}")
        return "\n".join(lines) + "\n"


def shape(device: str, bits_per_second: int, queue: int, verb: str = "add") -> str:
    """One line for ``tc -batch``; ``queue`` in bytes."""
    tbf = f"tbf rate {bits_per_second}bit burst {BURST} limit {queue}"
    return f"qdisc {verb} dev {device} root {tbf}"


def port_queue(bits_per_second: int) -> int:
    """Bytes that a port of this rate queues for its host."""
    queue = int(bits_per_second / 8 * PORT_QUEUE_SECONDS)
    return min(max(queue, PORT_QUEUE_LEAST), PORT_QUEUE_MOST)


def switch_links(plan: Plan, holders: list[int]) -> str:
    """Lines for ``ip -batch`` in the switch: bridges, ports, links into the hosts."""
    lines = []
    for nic in range(plan.nics):
        # Ports forward as soon as they are up: no spanning tree, no multicast queries.
        lines.append(f"link add br{nic} type bridge forward_delay 0 stp_state 0 mcast_snooping 0")
        for host, holder in enumerate(holders):
            port = plan.port(host, nic)
            lines.append(
                f"link add {port} mtu {plan.mtu} type veth"
                f" peer name {plan.device(nic)} mtu {plan.mtu} netns {holder}"
            )
            lines.append(f"link set {port} master br{nic} up")
        lines.append(f"link set br{nic} mtu {plan.mtu} up")
    return "\n".join(lines)


def host_links(plan: Plan, host: int) -> str:
    """Lines for ``ip -batch`` on a host."""
    lines = ["link set lo up"]
    for nic in range(plan.nics):
        device = plan.device(nic)
        lines.append(f"address add {plan.address(host, nic)}/24 dev {device}")
        lines.append(f"link set {device} gso_max_size {GSO} up")
    return "\n".join(lines)


def shape_host(plan: Plan, rates: list[int], verb: str = "add") -> list[str]:
    """Lines for ``tc -batch`` on a host, one per NIC; ``rates`` in bits per second."""
    return [shape(plan.device(nic), rate, HOST_QUEUE, verb) for nic, rate in enumerate(rates)]


def shape_ports(plan: Plan, host: int, rates: list[int], verb: str = "add") -> list[str]:
    """Lines for ``tc -batch`` in the switch, one per link of this host: the other ends."""
    return [
        shape(plan.port(host, nic), rate, port_queue(rate), verb) for nic, rate in enumerate(rates)
    ]
