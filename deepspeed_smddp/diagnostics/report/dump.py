"""What one rank leaves when a report is asked for, as JSON; unknown fields are ignored."""

from __future__ import annotations

import re
from dataclasses import field
from os import PathLike
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import dataclass

from deepspeed_smddp.diagnostics.rank_ports import Clock
from deepspeed_smddp.errors import CommandError

Number = float | int | str | None
# Operation without underscores -> the name by which torch's analyzer knows it. It knows no others;
# send and recv need a peer, which dumps do not name.
_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreducecoalesced": "allreduce_coalesced",
    "alltoall": "all_to_all",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "barrier")},
}
# What names of torch's functions add to them.
_FORMS = re.compile(r"(base|intotensor|tensor|single)$")


class DumpError(CommandError):
    """Dumps are missing, damaged or do not hold what is asked for; one sentence says what."""


@dataclass(slots=True)
class Operation:
    """One operation that a rank has called.

    ``id`` counts the calls of the process, over all groups, and ``sequence`` those of the group,
    both from 1. ``bytes`` are of all ranks' blocks. Times are unix seconds by the host's clock,
    None if that has not happened. ``label`` says what called it; "" is the user's code.
    ``parameters`` are the names of those that it moves, where they are known.
    """

    id: int
    group: str
    sequence: int
    operation: str
    bytes: int = 0
    dtype: str = ""
    path: str = ""
    label: str = ""
    parameters: list[str] = field(default_factory=list)
    called: float | None = None
    started: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    wait_entered: float | None = None
    wait_left: float | None = None
    state: str = "done"

    @property
    def kind(self) -> str:
        """The usual name of the operation; "" if it has none."""
        return _KINDS.get(_FORMS.sub("", self.operation.replace("_", "").lower()), "")

    @property
    def is_message(self) -> bool:
        """If it goes from one rank to one other: the other rank calls the other one of the two."""
        return self.operation in ("send", "recv")

    @property
    def unfinished(self) -> bool:
        """If it has not come to its end; one that failed never will."""
        return self.state != "done"

    @property
    def waited_for(self) -> bool:
        """If a thread of the rank stands in the wait for it, or stood there when it failed."""
        if self.state == "failed":
            return self.wait_entered is not None
        return self.unfinished and self.wait_entered is not None and self.wait_left is None


class Awaited(BaseModel):
    """A rank (global) whose bytes have not all arrived; ``seconds`` since the last of them."""

    rank: int
    expected: int = 0
    arrived: int = 0
    seconds: float = 0.0


class Oldest(BaseModel):
    """The oldest unfinished operation of a group."""

    sequence: int
    operation: str
    text: str = ""
    awaited: list[Awaited] = []


class Peer(BaseModel):
    """What the rank has counted of another one (global) while nothing failed.

    ``late``: collectives in which its callers waited for that rank to start, ``late_seconds`` how
    long. ``flow_bytes`` of large flows from there came in ``flow_seconds``, of which a caller
    waited ``flow_waited_seconds``.
    """

    rank: int
    late: int = 0
    late_seconds: float = 0.0
    flow_bytes: int = 0
    flow_seconds: float = 0.0
    flow_waited_seconds: float = 0.0


class Connection(BaseModel):
    """What the rank knows of the way to another one (global).

    ``state`` is one of

    - ``not contacted``: neither has sent anything to the other in this group,
    - ``no message yet``: this rank has sent, and nothing has come,
    - ``connected``: messages have come, or the two are of one host,
    - ``silent``: it has not answered the question whether it lives, for ``silent_seconds``,
    - ``stopped``: its process, of the same host, is stopped,
    - ``left``: it takes no part in the group any more, for the reason ``why``,
    - ``lost``: the connection broke or was given up, for the reason ``why``,
    - ``ended``: its process has ended.

    ``last_message_seconds`` have passed since the last message of it; None if none has come, and
    inside a host. ``path`` is ``shared memory``, or the provider and the NICs.
    """

    rank: int
    state: str = "connected"
    why: str = ""
    silent_seconds: float = 0.0
    last_message_seconds: float | None = None
    path: str = ""


class Group(BaseModel):
    """One group as the rank sees it: ``rank`` is that in the group, ``members`` are global ranks.

    ``submitted`` and ``finished`` count operations; ``hosts`` are those of the members.
    """

    name: str
    rank: int = 0
    members: list[int] = []
    hosts: list[str] = []
    peers: list[Peer] = []
    connections: list[Connection] = []
    submitted: int = 0
    finished: int = 0
    error: str = ""
    oldest: Oldest | None = None


class Frame(BaseModel):
    """One call of a thread; ``text`` is the source line, "" if it is not at hand.

    ``owner`` is the class of the module that the call runs, "" if it is none of a model's.
    """

    file: str
    line: int = 0
    function: str = ""
    text: str = ""
    owner: str = ""


class Stack(BaseModel):
    """The calls of one thread, the innermost last."""

    thread: str = ""
    main: bool = False
    frames: list[Frame] = []


class StepEnd(BaseModel):
    """When a step of the training ended, in unix seconds; ``number`` is DeepSpeed's, or a count."""

    number: int
    ended: float


class Dump(BaseModel):
    """The state of one rank: ``rank`` is global, ``ranks`` the size of the world.

    ``time`` is when it was made, in unix seconds, ``reason`` why, and ``error`` what this rank has
    raised ("" for nothing). ``operations`` are the last ones, the oldest first, ``steps`` as well.
    ``network`` has the settings, the count of refused messages, and ``link NIC``: the state of each
    NIC that messages take, "" if it is not known.
    ``clock`` is None on rank 0's host, and where rank 0 was not asked or did not answer.
    """

    version: int
    job: str = ""
    rank: int
    ranks: int
    host: str = ""
    pid: int = 0
    time: float = 0.0
    reason: str = ""
    error: str = ""
    operations: list[Operation] = []
    groups: list[Group] = []
    stacks: list[Stack] = []
    network: dict[str, Number] = {}
    clock: Clock | None = None
    steps: list[StepEnd] = []


def load(path: str | PathLike[str]) -> Dump:
    """The dump in a file.

    Raises:
        DumpError: the file can't be read, or it holds no dump.
    """
    try:
        return Dump.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise DumpError(f"{path} can't be read: {error.strerror}") from None
    except ValidationError as error:
        first, *more = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        text = f"{where}: {first['msg']}" if where else first["msg"]
        text += f" (and {len(more)} more)" if more else ""
        raise DumpError(f"{path} holds no dump of a rank: {text}") from None
