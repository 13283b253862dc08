"""The rendezvous of the ranks of ``smddp doctor``: a store of torch. It knows nothing of checks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_json

from deepspeed_smddp.distributed import launchers
from deepspeed_smddp.errors import CommandError

_LEAVING_SECONDS = 10.0
T = TypeVar("T")


class RendezvousError(CommandError):
    """This rank can't reach the others."""


@dataclass
class Rendezvous:
    """The store of one job, this process's rank, and the number of ranks."""

    store: Any
    rank: int
    size: int

    def put(self, key: str, value: object) -> None:
        """Publishes plain data or dataclasses."""
        self.store.set(f"doctor/{key}", to_json(value))

    def get(self, key: str, kind: type[T], seconds: float) -> T | None:
        """The value that a rank has published or publishes within ``seconds``; else None."""
        try:
            self.store.wait([f"doctor/{key}"], timedelta(seconds=max(0.001, seconds)))
        except (dist.DistStoreError, RuntimeError):
            return None
        return TypeAdapter(kind).validate_json(self.store.get(f"doctor/{key}"))

    def part(self, key: str) -> Any:
        """A store of its own, for what some of the ranks do together."""
        return dist.PrefixStore(f"doctor/{key}", self.store)  # type: ignore[attr-defined]

    def gather(
        self, key: str, own: T, seconds: float, ranks: Iterable[int] | None = None
    ) -> dict[int, T]:
        """On rank 0: the values of the ranks that published one in time. On others: empty.

        Rank 0 waits for ``ranks``, all by default.
        """
        self.put(f"{key}/{self.rank}", own)
        if self.rank != 0:
            return {}
        end = time.monotonic() + seconds
        asked = range(self.size) if ranks is None else ranks
        found = {
            rank: self.get(f"{key}/{rank}", type(own), end - time.monotonic()) for rank in asked
        }
        return {rank: value for rank, value in found.items() if value is not None}

    def share(self, key: str, kind: type[T], value: T | None, seconds: float) -> T | None:
        """Rank 0's value on all ranks; None on a rank that did not get it in time."""
        if self.rank == 0:
            self.put(key, value)
            return value
        return self.get(key, kind, seconds)

    def leave(self) -> None:
        """Keeps rank 0, which may serve the store, until the other ranks need it no more."""
        self.store.add("doctor/left", 1)
        end = time.monotonic() + (_LEAVING_SECONDS if self.rank == 0 else 0.0)
        while time.monotonic() < end and self.store.add("doctor/left", 0) < self.size:
            time.sleep(0.01)


def is_one_of_several() -> bool:
    """Whether a launcher started this process as one of several ranks; sets torch's variables.

    Raises:
        LauncherError: the variables of the launcher are not complete.
    """
    launchers.apply()
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def join(seconds: float) -> Rendezvous:
    """Connects this rank; does not wait for the others.

    Raises:
        RendezvousError: the store of rank 0 can't be reached within ``seconds``.
    """
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", launchers.PORT))
    # torchrun's agent serves a store at this address already.
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=rank == 0 and not served,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"rank {rank} can't reach the store of rank 0 at {address} port {port} within "
            f"{seconds:.0f} s ({str(error).splitlines()[0]}): check MASTER_ADDR, MASTER_PORT and "
            "the firewall"
        ) from None
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(dist.PrefixStore(f"smddp-doctor/{attempt}", store), rank, size)  # type: ignore[attr-defined]
