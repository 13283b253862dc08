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
from collections.abc import Sequence

from .host import Host

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


def parse_rate(rate: str) -> int:
    """Bits per second, from "1gbit", "2.5gbit", "100mbit", "64kbit"."""
    match = re.fullmatch(r"(\d+\.?\d*)([kmg]?bit)", rate.lower())
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 8000 <= bits <= 1e12:
        raise ValueError(f"rate {rate!r}: write it as 1gbit or 100mbit, at least 8kbit")
    return int(bits)


def switch_address(nic: int) -> str:
    """Of the bridge of plane ``nic``."""
    return f"10.77.{nic}.254"


def switch_links(hosts: Sequence[Host], mtu: int) -> list[str]:
    """Lines for ``ip -batch`` in the switch: bridges, ports, links into the hosts."""
    lines = ["link set lo up"]
    for nic in range(len(hosts[0].ports)):
        # Ports forward as soon as they are up: no spanning tree, no multicast queries.
        lines.append(f"link add br{nic} type bridge forward_delay 0 stp_state 0 mcast_snooping 0")
        for host in hosts:
            port = host.ports[nic]
            end = f"peer name {host.interfaces[nic]} mtu {mtu} netns {host.pid}"
            lines.append(f"link add {port} mtu {mtu} type veth {end}")
            lines.append(f"link set {port} master br{nic} up")
        lines.append(f"link set br{nic} mtu {mtu} up")
        lines.append(f"address add {switch_address(nic)}/24 dev br{nic}")
    return lines


def host_links(host: Host) -> list[str]:
    """Lines for ``ip -batch`` on a host."""
    lines = ["link set lo up"]
    for device, address in zip(host.interfaces, host.addresses, strict=True):
        lines.append(f"address add {address}/24 dev {device}")
        lines.append(f"link set {device} gso_max_size {GSO} up")
    return lines


def shape_host(host: Host, nic: int, rate: int, verb: str) -> str:
    """A line for ``tc -batch`` on the host; ``rate`` in bits per second."""
    return _shape(host.interfaces[nic], rate, HOST_QUEUE, verb)


def shape_port(host: Host, nic: int, rate: int, verb: str, queue: int | None = None) -> str:
    """A line for ``tc -batch`` in the switch: the link's other end."""
    if queue is None:
        queue = int(rate / 8 * PORT_QUEUE_SECONDS)
        queue = min(max(queue, PORT_QUEUE_LEAST), PORT_QUEUE_MOST)
    return _shape(host.ports[nic], rate, queue, verb)


def _shape(device: str, rate: int, queue: int, verb: str) -> str:
    return f"qdisc {verb} dev {device} root tbf rate {rate}bit burst {BURST} limit {queue}"
