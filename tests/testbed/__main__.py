"""``python -m tests.testbed``: the command line of the testbed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import Annotated

import typer

from .bed import Testbed
from .ceiling import ceiling as measure_ceiling
from .host import Host, TestbedError
from .launch import run_ranks

app = typer.Typer(
    add_completion=False,
    help="Several hosts on this machine that end with the command. Each has its own network, host "
    "name and /dev/shm. A link of a given rate joins each of its NICs to those of the other hosts. "
    "Needs root.",
)
Hosts = Annotated[int, typer.Option(min=1, max=250)]
Rate = Annotated[str, typer.Option(help="of each link in each direction: 1gbit, 100mbit, ...")]
Nics = Annotated[int, typer.Option(min=1, max=16, help="per host, one switch each")]
Mtu = Annotated[int, typer.Option(min=576, max=9216, help="bytes, of each link")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: list[str],
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    nics: Nics = 1,
    mtu: Mtu = 1500,
    ranks_per_host: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Starts a command once per rank, with the environment that torchrun would set.

    SMDDP_HOST_ID, SMDDP_FABRIC_INTERFACE and GLOO_SOCKET_IFNAME are set too. Each line of output
    starts with the rank in brackets. The exit status is that of the first rank that fails; the
    other ranks are ended then. Ctrl-C ends all ranks.
    """
    with Testbed(hosts, rate, nics, mtu) as bed:
        raise typer.Exit(run_ranks(bed, command, ranks_per_host))


@app.command()
def shell(hosts: Hosts = 2, rate: Rate = "1gbit", nics: Nics = 1, mtu: Mtu = 1500) -> None:
    """Opens a shell on host0, and prints how to enter the other hosts from another terminal."""
    with Testbed(hosts, rate, nics, mtu) as bed:
        for host in bed.hosts:
            print(f"{host.name}: {', '.join(host.addresses)}; as root: {enter(host)}")
        print("This is host0; leaving it ends all hosts.", flush=True)
        ours = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the shell handles its own Ctrl-C
        process = bed.hosts[0].popen(
            [os.environ.get("SHELL", "/bin/sh")],
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        status = process.wait()
        signal.signal(signal.SIGINT, ours)
        raise typer.Exit(status)


def enter(host: Host) -> str:
    """The command that opens a shell on a host from any terminal of root."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in host.environment.items()]
    inside = f"env -C {shlex.quote(os.getcwd())} {' '.join(variables)}"
    return f"nsenter -t {host.pid} -n -u -m {inside} {os.environ.get('SHELL', '/bin/sh')}"


@app.command()
def ceiling(
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    nics: Nics = 1,
    mtu: Mtu = 1500,
    seconds: Annotated[float, typer.Option(help="how long to measure")] = 4.0,
) -> None:
    """Measures plain TCP from every host to all others at once: payload, and share of the rate.

    At most 95.6% with an MTU of 1500.
    """
    with Testbed(hosts, rate, nics, mtu) as bed:
        print(measure_ceiling(bed, seconds))


@app.command()
def doctor() -> None:
    """Says whether a testbed works on this machine, or why not."""
    reason = Testbed.missing()
    if reason:
        print(f"no testbed here: {reason}")
        raise typer.Exit(1)
    print("a testbed works here")


if __name__ == "__main__":
    # SIGTERM shuts the hosts down in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (TestbedError, ValueError, FileNotFoundError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        sys.exit(2)
