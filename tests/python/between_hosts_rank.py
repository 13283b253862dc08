"""One rank of test_between_hosts: reads commands and writes answers as lines of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def answer_with(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Call:
    """A collective on `size` bytes of fp32 in total, with its expected result."""

    def __init__(self, op: str, size: int, group: dist.ProcessGroup) -> None:
        self.op, self.group = op, group
        ranks, self.rank = group.size(), group.rank()
        count = size // 4 // ranks
        shards = [torch.arange(count, dtype=torch.float32) % 1000 + r for r in range(ranks)]
        whole = torch.cat(shards)
        if op == "all_gather":
            self.input, self.output = shards[self.rank], torch.empty_like(whole)
            self.expected = whole
        elif op == "reduce_scatter":
            self.input, self.output = whole + self.rank, torch.empty(count)
            self.expected = shards[self.rank] * ranks + sum(range(ranks))
        else:
            self.input = self.output = whole + self.rank
            self.expected = whole * ranks + sum(range(ranks))

    def start(self) -> dist.Work:
        if self.op == "all_gather":
            work = dist.all_gather_into_tensor(
                self.output, self.input, group=self.group, async_op=True
            )
        elif self.op == "reduce_scatter":
            work = dist.reduce_scatter_tensor(
                self.output, self.input, group=self.group, async_op=True
            )
        else:
            work = dist.all_reduce(self.output, group=self.group, async_op=True)
        assert work is not None
        return work

    def verdict(self) -> str:
        return "right" if torch.equal(self.output, self.expected) else "wrong"


def run(op: str, size: int, times: int, group: dist.ProcessGroup) -> str:
    verdicts = {"right"}
    for _ in range(times):
        call = Call(op, size, group)
        try:
            call.start().wait()
        except Exception as error:
            return str(error)
        verdicts.add(call.verdict())
    return "right" if verdicts == {"right"} else "wrong"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    world = dist.group.WORLD
    assert world is not None
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    pair: dist.ProcessGroup | None = None
    pending: tuple[Call, dist.Work] | None = None
    answer_with("ready")
    for line in sys.stdin:
        command, *rest = json.loads(line)
        if command == "run":
            answer_with(run(*rest, world))
        elif command == "pair":
            made = dist.new_group([0, 1], backend="smddp")
            pair = made if isinstance(made, dist.ProcessGroup) else None
            answer_with("made")
        elif command == "run_pair":
            assert pair is not None
            answer = run(*rest, pair)
            answer_with([answer, pending is not None and pending[1].is_completed()])
        elif command == "again":  # all ranks join anew, in the same process
            dist.destroy_process_group()
            anew = dist.PrefixStore(rest[0], store)
            dist.init_process_group("smddp", store=anew, rank=rank, world_size=size)
            world = dist.group.WORLD
            assert world is not None
            answer_with("joined")
        elif command == "start":
            call = Call(*rest, world)
            pending = (call, call.start())
        elif command == "finish":
            assert pending is not None
            pending[1].wait()
            answer_with(pending[0].verdict())
        else:
            break
    dist.destroy_process_group()


main()
