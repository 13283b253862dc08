"""Connections and links that are not in order: which rank is lost, ended or silent, and to whom."""

from __future__ import annotations

from collections import defaultdict

from deepspeed_smddp.diagnostics.report.dump import Connection
from deepspeed_smddp.diagnostics.report.dump_terms import LINK
from deepspeed_smddp.diagnostics.report.job import Job
from deepspeed_smddp.diagnostics.report.wording import rank_list, seconds, span

# The worst first. A rank that has left the group has raised an error, or ended: others say so.
_TOLD = ("ended", "lost", "stopped", "silent", "no message yet")
_Sight = tuple[int, Connection]


def rows(job: Job) -> list[str]:
    """One row for each link that is not up, and for each state that ranks see another one in."""
    return [*_links(job), *_connections(job)]


def _links(job: Job) -> list[str]:
    down: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, dump in job.dumps.items():
        for key, state in dump.network.items():
            if key.startswith(LINK) and state not in ("up", ""):
                down[dump.host, key, str(state)].append(rank)
    return [
        f"{host}: {link}: {state}, say {rank_list(ranks)}"
        for (host, link, state), ranks in sorted(down.items())
    ]


def _connections(job: Job) -> list[str]:
    seen: dict[tuple[int, int, str], list[_Sight]] = defaultdict(list)
    for view in job.groups.values():
        for rank, group in view.seen.items():
            awaited = {peer.rank for peer in group.oldest.awaited} if group.oldest else set()
            for connection in group.connections:
                if connection.state not in _TOLD:
                    continue
                # Not yet answered is news only of a rank that is waited for.
                if connection.state == "no message yet" and connection.rank not in awaited:
                    continue
                key = (_TOLD.index(connection.state), connection.rank, connection.path)
                seen[key].append((rank, connection))
    return [_row(job, seen[key]) for key in sorted(seen)]


def _row(job: Job, sights: list[_Sight]) -> str:
    connection = sights[0][1]
    silent = span([c.silent_seconds for _, c in sights])
    last = [c.last_message_seconds for _, c in sights if c.last_message_seconds is not None]
    state = {"silent": f"silent for {silent}"}.get(connection.state, connection.state)
    text = f"{job.named([connection.rank])}: {state}, to {rank_list({r for r, _ in sights})}"
    if last:
        text += f", last message {seconds(min(last))} ago"
    text += f", over {connection.path}" if connection.path else ""
    why = next((c.why for _, c in sights if c.why), "")
    return f"{text}: {why}" if why else text
