"""The hang report: one page of text made of the dumps of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_smddp.diagnostics.report.dump import Awaited, Dump, DumpError, Group, Oldest, load
from deepspeed_smddp.diagnostics.report.dump import Operation as Op
from deepspeed_smddp.diagnostics.report.page import COLUMNS, LINES, page
from deepspeed_smddp.diagnostics.report.stack import Doing, doing
from harness.dumps import GATHER, MIB, NOW, SITE, Rank, frame, in_gather, main_thread, user

LAYER = "ZeRO-3 module transformer.h.{} (2 parameters)"


def report(ranks: Iterable[Rank], size: int = 4, gone: dict[int, str] | None = None) -> str:
    dumps = {r.rank: Dump.model_validate_json(r.dump().model_dump_json()) for r in ranks}
    text = page(dumps, gone or {}, size, folder="/shared/dumps")
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    return text


def why(text: str) -> str:
    """The verdict, on one line."""
    found = re.search(r"^Why: (.*?)\n\n", text, re.S | re.M)
    assert found, text
    return " ".join(found.group(1).split())


def three_waiting(**more: object) -> list[Rank]:
    return [Rank(r, 4).call().wait(**more) for r in range(3)]


def test_a_rank_is_elsewhere() -> None:
    """test_reports.py has other places."""
    debugger = (
        user(31, "main", "breakpoint()"),
        frame("/usr/lib/python3.11/bdb.py", 90, "trace_dispatch"),
        frame("/usr/lib/python3.11/pdb.py", 260, "user_line"),
        frame("/usr/lib/python3.11/cmd.py", 126, "cmdloop", "line = input(self.prompt)"),
    )
    text = report([*three_waiting(label="DDP bucket 2"), Rank(3, 4).call().at(*debugger)])
    assert why(text).startswith(
        "rank 3 (host-b) is in the debugger (pdb), called at train.py:31 in main, and has not "
        "called all_gather #2 of group 'default' (4 MiB, DDP bucket 2), in which ranks 0-2 wait, "
        "for 35 s. It is 1 call behind in this group"
    )
    assert "What to do: continue the debugger" in text and "/shared/dumps" in text


def test_a_rank_is_gone() -> None:
    ended = "its process has ended (192.0.2.2:41234 refuses connections)"
    text = report(three_waiting(), gone={3: ended})
    assert why(text).startswith(f"rank 3 (host-b) is gone: {ended}; ranks 0-2 wait in all_gather")
    silent = report(three_waiting(), gone={3: "it has not answered for 30 s"})
    assert why(silent).startswith("rank 3 (host-b) is silent: it has not answered for 30 s")


TCP = "tcp;ofi_rxm on eth0 (10.0.0.2)"


def test_connections_that_are_not_in_order() -> None:
    ranks = three_waiting()
    ranks[0].sees(1, "connected", path="shared memory").sees(2, "not contacted", path=TCP)
    ranks[0].sees(3, "silent", silent_seconds=4.0, last_message_seconds=35.2, path=TCP)
    ranks[1].sees(3, "silent", silent_seconds=5.0, last_message_seconds=36.0, path=TCP)
    ranks[1].sees(2, "no message yet", path=TCP)  # which rank 1 does not wait for
    ranks[2].sees(3, "stopped", path="shared memory")
    ranks[2].sees(1, "lost", why="the connection to it broke: reset", path=TCP)
    text = re.sub(r"\n  (?! )", " ", report(ranks))
    assert (
        "\nConnections:\n"
        f"- rank 1 (host-a): lost, to rank 2, over {TCP}: the connection to it broke: reset\n"
        "- rank 3 (host-b): stopped, to rank 2, over shared memory\n"
        "- rank 3 (host-b): silent for 4.0 s to 5.0 s, to ranks 0, 1, last message 35 s ago, over "
        f"{TCP}\n\n"
    ) in text, text
    assert "Connections:" not in report(three_waiting())


def test_a_link_that_is_not_up() -> None:
    ranks = three_waiting()
    for rank in ranks:
        rank.fields["network"] = {"link eth0": "up" if rank.rank == 2 else "no carrier"}
    assert "\nConnections:\n- host-a: link eth0: no carrier, say ranks 0, 1\n" in report(ranks)


def test_a_rank_left_no_dump() -> None:
    assert why(report(three_waiting())).startswith(
        "rank 3 (host-b) left no dump within 10 s: it is stopped, or its interpreter does not run "
        "(something holds the GIL); ranks 0-2 wait in all_gather #2"
    )


def test_another_size() -> None:
    ranks = [*three_waiting(), Rank(3, 4).call().wait(bytes=2 * MIB)]
    text = report(ranks)
    assert why(text) == (
        "rank 3 (host-b) calls all_gather #2 of group 'default' with another size: ranks 0-2: "
        "all_gather of 4 MiB; rank 3: all_gather of 2 MiB."
    )
    assert "group 'default', operation #2 (#1 is the same on them):" in text


def test_a_skipped_collective() -> None:
    ranks = [
        Rank(r, 4).call().wait("barrier", bytes=0).wait("all_gather", label="layers.1")
        for r in range(3)
    ]
    text = report([*ranks, Rank(3, 4).call().wait("all_gather", label="layers.1")])
    assert why(text).startswith(
        "rank 3 (host-b) calls another operation as #2 of group 'default': ranks 0-2: barrier; "
        "rank 3: all_gather of 4 MiB for layers.1. Rank 3 has left out barrier: its calls from #2 "
        "on are those of ranks 0-2 from #3 on (1 compared)"
    )


def test_one_call_more() -> None:
    ranks = [Rank(r, 4).call().wait("all_reduce", bytes=8) for r in range(3)]
    odd = Rank(3, 4).call().wait("broadcast").wait("all_reduce", bytes=8)
    assert "Rank 3 has called broadcast of 4 MiB once more" in why(report([*ranks, odd]))


def test_modules_in_another_order() -> None:
    def run(rank: int, *layers: int) -> Rank:
        calls = Rank(rank, 4)
        for layer in layers[:-1]:
            calls.call(label=f"layers.{layer}")
        return calls.wait(label=f"layers.{layers[-1]}")

    text = report([run(0, 0, 2, 3), *(run(r, 0, 1, 2, 3) for r in (1, 2, 3))])
    assert why(text).startswith(
        "rank 0 (host-a) calls the operations of group 'default' in another order from #2 on: "
        "ranks 1-3: all_gather of 4 MiB for layers.1; rank 0: all_gather of 4 MiB for layers.2. "
        "Rank 0 has left out"
    )


def test_a_ring_that_starts_later_is_compared_where_both_have_it() -> None:
    dumps = []
    for r in range(4):
        calls = Rank(r, 4)
        for i in range(20):
            calls.call(label=f"layers.{i}")
        dumps.append(calls.wait(bytes=(1 if r else 2) * MIB))
    dumps[2].operations = dumps[2].operations[-3:]
    assert "rank 0 (host-a) calls all_gather #21" in why(report(dumps))


def crossed() -> str:
    groups = {"tp": [0, 1], "dp": [0, 1]}
    first, second = Rank(0, 2, groups), Rank(1, 2, groups)
    for rank in (first, second):
        for _ in range(4):
            rank.call(group="tp")
        for _ in range(6):
            rank.call("all_reduce", group="dp")
    first.stacks = [in_gather(10, "forward")]
    second.stacks = [in_gather(24, "average")]
    first.wait(group="tp")
    second.wait("all_reduce", group="dp")
    return report([first, second], 2)


def test_two_groups_in_another_order() -> None:
    text = crossed()
    assert why(text) == (
        "ranks 0, 1 use the groups 'tp' and 'dp' in another order: rank 0 (host-a) waits in "
        "all_gather #5 of group 'tp' (4 MiB) at train.py:10 in forward and has not called "
        "all_reduce #7 of group 'dp'; rank 1 (host-b) waits in all_reduce #7 of group 'dp' (4 MiB) "
        "at train.py:24 in average and has not called all_gather #5 of group 'tp'."
    )
    assert "in the same order on all ranks, or make the calls" in text


def test_generate_with_fewer_tokens() -> None:
    generate = frame(f"{SITE}/transformers/generation/utils.py", 2000, "_sample")
    ranks = []
    for r in range(4):
        calls = Rank(r, 4).call(label=LAYER.format(0))
        if r == 1:
            calls.at(user(70, "main", "print(tokenizer.decode(tokens[0]))"))
        else:
            calls.wait(label=LAYER.format(1)).at(user(69), generate, in_gather().frames[1])
        ranks.append(calls)
    text = report(ranks)
    assert why(text).startswith(
        "rank 1 (host-a) does not run ZeRO-3 module transformer.h.1 (2 parameters), for which "
        "ranks 0, 2, 3 wait in all_gather #2 of group 'default' (4 MiB), for 35 s: rank 1 (host-a) "
        "is at train.py:70 in main. ZeRO-3 needs all ranks to run the same modules"
    )
    assert "synced_gpus=True" in text


def test_a_forward_pass_on_one_rank() -> None:
    """Of a ZeRO-3 model: the others compute, or are in another collective."""
    alone = Rank(0, 4).call().wait(label=LAYER.format(0))
    others = [Rank(r, 4).call().at(user(92, "evaluate")) for r in (1, 2, 3)]
    text = report([alone, *others])
    assert why(text).startswith(
        "only rank 0 (host-a) runs ZeRO-3 module transformer.h.0 (2 parameters): it waits in "
    )
    assert "ranks 1-3 are at train.py:92 in evaluate. ZeRO-3 needs all ranks" in why(text)
    assert "`if rank == 0`" in text and "set_z3_leaf_modules" in text and "dummy input" in text
    others = [Rank(r, 4).call().wait("barrier", bytes=0) for r in (1, 2, 3)]
    text = why(report([alone, *others]))
    assert "rank 0: all_gather of 4 MiB for ZeRO-3 module transformer.h.0" in text
    assert "ZeRO-3 needs all ranks to run the same modules" in text


def test_the_rank_that_raised_comes_first() -> None:
    ranks = three_waiting()
    ranks[0].fields["error"] = "rank 3 (host-b) (process 9) ended during all_gather #2"
    odd = Rank(3, 4).call()
    odd.fields["error"] = "RuntimeError: CUDA out of memory"
    text = report([*ranks, odd])
    assert why(text).startswith("rank 3 (host-b) raised an error first, by the times of the dumps")
    assert "CUDA out of memory" in why(text)
    ranks[1].fields["error"] = (
        "rank 3 (host-b) called all_gather(8 bytes in all) while rank 1 (host-a) called all_gather("
        "4 bytes in all)"
    )
    assert why(report([*ranks, odd])).startswith("rank 1 (host-a) raised that ranks call different")


def test_what_two_threads_of_a_rank_call_is_no_matter_of_shapes() -> None:
    """An asynchronous checkpoint over the group of the training."""
    saves = frame(f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", 7, "async_save")
    ranks = [Rank(r, 4).call() for r in range(4)]
    for rank in ranks:
        sizes = (8, 4 * MIB) if rank.rank else (4 * MIB, 8)
        for size in sizes:
            rank.wait(bytes=size)
        writer = main_thread(user(31, "save"), saves, GATHER)
        rank.stacks = [in_gather(), writer.model_copy(update={"main": False})]
    text = " ".join(report(ranks).split())
    assert "with another size" in text
    assert "What to do: give the other thread of rank 0, at train.py:31 in save, a group" in text


def test_a_group_is_made_at_the_users_line() -> None:
    """Also if the package is installed in place."""
    made = frame(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "new_group")
    entry = frame("/src/smddp_autoload.py", 65, "_create")
    assert doing([user(5, "main"), made, entry]).where == "at train.py:5 in main"


def test_bytes_that_do_not_arrive() -> None:
    dumps = {r: Rank(r, 4).call().wait().dump() for r in range(4)}
    for rank in (0, 1, 3):
        oldest = dumps[rank].groups[0].oldest
        assert oldest is not None
        oldest.awaited = [Awaited(rank=2, expected=MIB, arrived=4096, seconds=34)]
    text = page(dumps, {}, 4)
    assert "but ranks 0, 1, 3 lack bytes of rank 2: 4 KiB of 1 MiB have arrived" in why(text)


def test_a_healthy_job() -> None:
    idle = [Rank(r, 4).call().at(user(12, "main", "loss = model(batch)")) for r in range(4)]
    assert why(report(idle)).startswith("all 4 ranks wait in nothing: no operation of any group")
    short = {"called": NOW - 0.1, "wait_entered": NOW - 0.1}
    running = [Rank(r, 4).call().wait(**short) for r in range(3)]
    text = report([*running, Rank(3, 4).call().at(user(12))])
    assert why(text).startswith("the dumps show no hang")


def test_a_thousand_ranks_fit_one_page() -> None:
    calls: list[Rank] = []
    for r in range(999):
        if r % 7:
            calls.append(Rank(r, 1000).call().wait(label=f"layers.{r % 50}"))
        else:
            calls.append(Rank(r, 1000).call().at(user(r + 1, f"function_{r}")))
    text = report(calls, 1000)
    assert "rank 999 (host-b) left no dump" in why(text)
    assert re.search(r"and \d+ more rows", text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("time.sleep(100)", Doing.SLEEP),
        ("name = input('?')", Doing.INPUT),
        ("lock.acquire()", Doing.LOCK),
        ("thread.join()", Doing.LOCK),
        ("value = loss.item()", Doing.DEVICE),
        ("x = x + 1", Doing.USER),
    ],
)
def test_the_source_line_tells_what_has_no_frame(text: str, kind: Doing) -> None:
    assert doing([user(5, "main", text)]).doing is kind


def test_a_collective_in_a_thread_of_the_backward_pass() -> None:
    backward = frame(f"{SITE}/torch/_tensor.py", 600, "backward")
    stacks = [main_thread(user(5), backward), in_gather()]
    stacks[1].main = False
    rank = Rank(0, 1).call()
    rank.stacks = stacks
    assert "whose thread is in all_gather_into_tensor" in " ".join(report([rank], 1).split())


def test_a_damaged_dump_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rank_3.json"
    for content, said in (
        ('{"version": 1, "rank', "holds no dump of a rank: "),
        ('{"version": 1, "rank": 2}', "holds no dump of a rank: ranks: Field required"),
    ):
        file.write_text(content)
        with pytest.raises(DumpError, match=rf"rank_3\.json {said}"):
            load(file)
    with pytest.raises(DumpError, match=r"missing\.json can't be read"):
        load("/missing.json")
    file.write_text('{"version": 9, "rank": 2, "ranks": 4, "colour": "red"}')
    assert load(file).rank == 2


TIMES = st.none() | st.floats(NOW - 1e4, NOW)
WORDS = st.sampled_from(["", "layers.1", LAYER.format(1), "\x1b[2Jw\n", "x" * 300])


RANKS = st.integers(0, 5)
OPERATIONS = st.builds(
    Op,
    id=st.integers(1, 9),
    group=st.sampled_from(["default", "dp"]),
    sequence=st.integers(1, 8),
    operation=st.sampled_from(["all_gather", "barrier", "scatter"]),
    bytes=st.sampled_from([0, 5, MIB]),
    dtype=st.sampled_from(["", "float32"]),
    label=WORDS,
    called=TIMES,
    started=TIMES,
    wait_entered=TIMES,
    wait_left=TIMES,
    state=st.sampled_from(["queued", "running", "done", "failed"]),
)
AWAITED = st.builds(Awaited, rank=RANKS, expected=st.just(9), seconds=st.floats())
GROUPS = st.builds(
    Group,
    name=st.sampled_from(["default", "dp"]),
    members=st.just(list(range(5))),
    hosts=st.lists(WORDS, max_size=5),
    submitted=st.integers(0, 8),
    error=WORDS,
    oldest=st.none()
    | st.builds(
        Oldest,
        sequence=st.integers(1, 9),
        operation=st.just("all_gather"),
        awaited=st.lists(AWAITED, max_size=2),
    ),
)
STACKS = st.builds(main_thread, st.builds(frame, WORDS, st.just(1), WORDS, WORDS))
DUMPS = st.builds(
    Dump,
    version=st.just(1),
    rank=st.just(0),
    ranks=st.just(5),
    host=WORDS,
    time=st.floats(0, 1e18),
    reason=WORDS,
    error=WORDS,
    operations=st.lists(OPERATIONS, max_size=8),
    groups=st.lists(GROUPS, max_size=2),
    stacks=st.lists(STACKS, max_size=2),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(DUMPS | WORDS | st.none(), min_size=1, max_size=5))
def test_any_dumps_make_a_page(ranks: list[Dump | str | None]) -> None:
    """Of each rank there is a dump, or a sentence that it is gone, or neither."""
    dumps = {
        r: d.model_copy(update={"rank": r}) for r, d in enumerate(ranks) if isinstance(d, Dump)
    }
    gone = {rank: text for rank, text in enumerate(ranks) if isinstance(text, str)}
    text = page(dumps, gone, len(ranks), folder="/dumps")
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert any(line.startswith("Why: ") for line in lines)
