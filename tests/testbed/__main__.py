"""`python -m tests.testbed`: the command line of the testbed."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from .bed import Testbed
from .ceiling import ceiling
from .errors import TestbedError
from .host import Host
from .launch import run_ranks

DESCRIPTION = """\
Several hosts on this machine. Each host has its own network, host name and /dev/shm. A link of a
given rate joins each of its NICs to the NICs of the other hosts. The hosts end with the command.
Needs root."""

EXAMPLES = """\
examples:
  python -m tests.testbed doctor
  python -m tests.testbed run --hosts 2 --ranks-per-host 2 --rate 1gbit -- python train.py
  python -m tests.testbed shell --hosts 4 --rate 100mbit --nics 2
  python -m tests.testbed ceiling --hosts 4 --rate 1gbit
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m tests.testbed",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--hosts", type=int, default=2, metavar="K", help="default 2")
    shape.add_argument(
        "--rate",
        default="1gbit",
        help="rate of each link in each direction: 1gbit, 100mbit, ... (default 1gbit)",
    )
    shape.add_argument(
        "--nics", type=int, default=1, metavar="N", help="NICs per host, one switch each; default 1"
    )
    shape.add_argument(
        "--mtu", type=int, default=1500, metavar="BYTES", help="MTU of each link; default 1500"
    )

    run = commands.add_parser(
        "run",
        parents=[shape],
        formatter_class=raw,
        help="start a command once per rank",
        description="Start a command once per rank, with the environment that torchrun would set\n"
        "(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and\n"
        "SMDDP_HOST_ID, SMDDP_FABRIC_INTERFACE and GLOO_SOCKET_IFNAME. Each line of output starts\n"
        "with the rank in brackets. The exit status is that of the first rank that fails; the\n"
        "other ranks are ended then. Ctrl-C ends all ranks.",
    )
    run.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="R", help="processes per host; default 1"
    )
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    commands.add_parser(
        "shell",
        parents=[shape],
        help="open a shell on host0 while the hosts exist",
        description="Open a shell on host0, and print how to enter the other hosts from another"
        " terminal. Leaving the shell ends the hosts and every process on them.",
    )

    top_speed = commands.add_parser(
        "ceiling",
        parents=[shape],
        help="measure the throughput of plain TCP sockets",
        description="Bulk TCP from every host to all others at once: the payload that each host"
        " receives (median over time), and its share of the rate. At most 95.6 %% with an MTU of"
        " 1500.",
    )
    top_speed.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        metavar="S",
        help="how long to measure; default 4",
    )

    commands.add_parser("doctor", help="say whether a testbed works on this machine, or why not")
    return top


def enter(host: Host) -> str:
    """The command that opens a shell on a host from any terminal of root."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in host.environment.items()]
    inside = f"env -C {shlex.quote(os.getcwd())} {' '.join(variables)}"
    return f"nsenter -t {host.pid} -n -u -m {inside} {os.environ.get('SHELL', '/bin/sh')}"


def shell(bed: Testbed) -> int:
    """Run a shell on the first host; its exit status."""
    first, *others = bed.hosts
    for host in bed.hosts:
        print(f"{host.name}: {', '.join(host.addresses)}")
    if others:
        print("To enter the other hosts from any terminal of root, including this one:")
        for host in others:
            print(f"  {enter(host)}")
    print(f"This is {first.name}; leaving it ends all hosts.", flush=True)
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the shell handles its own Ctrl-C
    process = first.popen(
        [os.environ.get("SHELL", "/bin/sh")],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, ours)


def doctor() -> int:
    """Print whether a testbed works here; 0 if it does."""
    reason = Testbed.missing()
    if reason:
        print(f"no testbed here: {reason}")
        return 1
    with Testbed(hosts=2) as bed:
        bed.hosts[0].run(["true"], check=True)
    print("a testbed works here")
    return 0


def execute(options: argparse.Namespace) -> int:
    """Run the subcommand; returns its exit status."""
    if options.command == "doctor":
        return doctor()
    with Testbed(options.hosts, options.rate, options.nics, options.mtu) as bed:
        if options.command == "shell":
            return shell(bed)
        if options.command == "ceiling":
            print(ceiling(bed, options.seconds))
            return 0
        return run_ranks(bed, options.argv, options.ranks_per_host)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.command == "run":
        options.argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
        if not options.argv:
            command_line.error("run: give the command after --")
        if options.ranks_per_host < 1:
            command_line.error("run: --ranks-per-host must be 1 or more")
    # SIGTERM shuts the hosts down in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return execute(options)
    except KeyboardInterrupt:
        return 130
    except (TestbedError, ValueError, FileNotFoundError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
