"""What a process is, its ranks tell once per job: further groups refer to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ranks

# A file store appends each value that is set, and keeps those that are removed.
PROGRAM = """
    import os
    import torch, torch.distributed as dist

    rank, path = int(os.environ["RANK"]), STORE

    def told():
        dist.barrier()
        with open(path, "rb") as store:
            count = store.read().count(b"identity of a host")
        dist.barrier()
        return count

    os.environ["SMDDP_HOST_ID"] = f"identity of a host {rank // 2 if HOSTS == 2 else 0}"
    dist.init_process_group("smddp", init_method=f"file://{path}", rank=rank, world_size=4)
    first = told()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 1], [3, 2, 1, 0])]
    further = told()
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == dist.get_world_size(group)
    print("TOLD", first, further - first, flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("hosts", [1, 2])
def test_further_groups_tell_no_process_again(hosts: int, tmp_path: Path) -> None:
    program = PROGRAM.replace("HOSTS", str(hosts))
    for text in ranks.run(program.replace("STORE", repr(str(tmp_path / "store"))), 4):
        assert re.search("TOLD [1-9][0-9]* 0$", text), text
