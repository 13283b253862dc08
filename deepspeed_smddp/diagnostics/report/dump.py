"""What one rank leaves when a report is asked for, as JSON."""

from __future__ import annotations

from dataclasses import field as dataclass_field
from os import PathLike, fspath
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from deepspeed_smddp.diagnostics.rank_ports import Clock
from deepspeed_smddp.errors import CommandError

Number = float | int | str | None
# Operation without underscores -> the name by which torch's analyzer knows it. It knows no others;
# send and recv need a peer, which dumps do not name.
_KINDS = {
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreducecoalesced": "allreduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "barrier": "barrier",
}


class DumpError(CommandError):
    """Dumps are missing, damaged or do not hold what is asked for; one sentence says what."""


@dataclass(slots=True, config=ConfigDict(extra="ignore"))
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
    parameters: list[str] = dataclass_field(default_factory=list)
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
        return _KINDS.get(self.operation.replace("_", "").lower(), "")

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


class _Part(BaseModel):
    """Fields that a newer version adds are ignored."""

    model_config = ConfigDict(extra="ignore")


class Awaited(_Part):
    """A rank (global) whose bytes have not all arrived; ``seconds`` since the last of them."""

    rank: int
    expected: int = 0
    arrived: int = 0
    seconds: float = 0.0


class Oldest(_Part):
    """The oldest unfinished operation of a group."""

    sequence: int
    operation: str
    text: str = ""
    awaited: list[Awaited] = Field(default_factory=list)


class Peer(_Part):
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


class Connection(_Part):
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


class Group(_Part):
    """One group as the rank sees it: ``rank`` is that in the group, ``members`` are global ranks.

    ``submitted`` and ``finished`` count operations; ``hosts`` are those of the members.
    """

    name: str
    rank: int = 0
    members: list[int] = Field(default_factory=list)
    hosts: list[str] = Field(default_factory=list)
    peers: list[Peer] = Field(default_factory=list)
    connections: list[Connection] = Field(default_factory=list)
    submitted: int = 0
    finished: int = 0
    error: str = ""
    oldest: Oldest | None = None


class Frame(_Part):
    """One call of a thread; ``text`` is the source line, "" if it is not at hand.

    ``owner`` is the class of the module that the call runs, "" if it is none of a model's.
    """

    file: str
    line: int = 0
    function: str = ""
    text: str = ""
    owner: str = ""


class Stack(_Part):
    """The calls of one thread, the innermost last."""

    thread: str = ""
    main: bool = False
    frames: list[Frame] = Field(default_factory=list)


class StepEnd(_Part):
    """When a step of the training ended, in unix seconds; ``number`` is DeepSpeed's, or a count."""

    number: int
    ended: float


class Dump(_Part):
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
    operations: list[Operation] = Field(default_factory=list)
    groups: list[Group] = Field(default_factory=list)
    stacks: list[Stack] = Field(default_factory=list)
    network: dict[str, Number] = Field(default_factory=dict)
    clock: Clock | None = None
    steps: list[StepEnd] = Field(default_factory=list)


def load(source: str | PathLike[str] | bytes, name: str = "") -> Dump:
    """The dump in a file, or in bytes of JSON that came from ``name``.

    Raises:
        DumpError: the file can't be read, or it holds no dump.
    """
    if isinstance(source, bytes):
        shown, content = name or "dump", source
    else:
        shown = name or fspath(source)
        try:
            content = Path(source).read_bytes()
        except OSError as error:
            raise DumpError(f"{shown} can't be read: {error.strerror}") from None
    try:
        return Dump.model_validate_json(content)
    except ValidationError as error:
        raise DumpError(f"{shown} holds no dump of a rank: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)
    where = ".".join(str(part) for part in problems[0]["loc"])
    text = f"{where}: {problems[0]['msg']}" if where else problems[0]["msg"]
    more = len(problems) - 1
    return f"{text} (and {more} more)" if more else text
