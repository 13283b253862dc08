"""``smddp trace``: from dumps, or from a running job, to a trace file and a picture."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from deepspeed_smddp.commands.report import ask
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.report import dump
from deepspeed_smddp.diagnostics.report.dump import Dump, DumpError
from deepspeed_smddp.diagnostics.report.wording import count, rank_list, verb
from deepspeed_smddp.diagnostics.trace import views
from deepspeed_smddp.diagnostics.trace.timeline import Span, Timeline, timeline

_NAMES = "rank-*.json"


def trace(
    dumps: Annotated[
        list[str] | None,
        Argument(
            help="Files or folders with the dumps of a report, or a running job or process of it; "
            "none: the job of this host."
        ),
    ] = None,
    output: Annotated[
        Path, Option("-o", "--output", dir_okay=False, help="The trace; .gz: compressed.")
    ] = Path("trace.json"),
    step: Annotated[int | None, Option(help="This step of the training only.")] = None,
    png: Annotated[
        Path | None,
        Option(dir_okay=False, help="A picture of the step, else of the last whole one."),
    ] = None,
) -> None:
    """Write what all ranks did, on one clock, as a trace for Perfetto and chrome://tracing.

    It has compute, waits and every collective. Asks a running job, or reads the dumps of a report.
    """
    output_files.check_writable([output])
    output_files.check_picture("a picture", png)
    found = make(dumps or [])
    span = None if step is None else found.step(step)
    _write(found, span, output)
    for line in summary(found):
        echo(line)
    if png is not None:
        name, shown = _last(found) if span is None else (f"step {step}", span)
        echo(f"{png}: {views.draw(found, name, shown, png)}")
    echo(f"{output}: open it at https://ui.perfetto.dev or chrome://tracing")


def read(paths: Sequence[Path]) -> dict[int, Dump]:
    """The dumps of one job by rank: of files, of folders of reports, and of folders of jobs.

    Of a job's folder, with its ``report-*``, the latest report counts.

    Raises:
        DumpError: no dumps are there, one can't be read, or they are not those of one report.
    """
    dumps: dict[int, Dump] = {}
    files: dict[int, Path] = {}
    for path in _files(paths):
        try:
            found = dump.load(path)
        except DumpError as error:
            raise DumpError(f"{error}: copy it again, or leave it out") from None
        first = next(iter(dumps.values()), found)
        if (found.job, found.ranks) != (first.job, first.ranks):
            raise DumpError(
                f"these dumps are of different jobs: {files[first.rank]} of job {first.job} with "
                f"{count(first.ranks, 'rank')}, {path} of job {found.job} with "
                f"{count(found.ranks, 'rank')}: give those of one"
            )
        if found.rank in dumps:
            raise DumpError(
                f"{files[found.rank]} and {path} are both of rank {found.rank}: "
                "give the dumps of one report"
            )
        dumps[found.rank], files[found.rank] = found, path
    return dumps


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(_NAMES))
        reports = [folder for folder in path.glob("report-*") if any(folder.glob(_NAMES))]
        if not found and reports:
            found = sorted(max(reports, key=lambda folder: folder.stat().st_mtime).glob(_NAMES))
        if not found:
            raise DumpError(
                f"{path} holds no dump ({_NAMES}): `smddp report` on a host of the running job "
                "makes the ranks write them"
            )
        yield from found


def _last(found: Timeline) -> tuple[str, Span]:
    """What a picture shows if no step is asked for: the last whole step, else the whole record."""
    if steps := found.steps():
        return f"step {max(steps)}", steps[max(steps)]
    ends = [f.span[1] for line in found.ranks.values() for f in line.flights]
    if not ends:
        raise DumpError("the dumps hold no operations: the job has called none")
    return "the record", (found.zero, max(ends))


def _write(found: Timeline, span: Span | None, path: Path) -> None:
    """Writes the trace, compressed if the name ends with ``.gz``."""
    text = json.dumps(views.trace(found, span)).encode()
    try:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    except OSError as error:
        raise DumpError(f"{path} can't be written: {error.strerror}") from None


def summary(found: Timeline) -> list[str]:
    """Lines about the ranks in the trace, their clocks, and what is missing."""
    operations = sum(len(line.flights) for line in found.ranks.values())
    steps = list(found.steps())
    lines = [
        f"job {found.job}: {operations} operations of {rank_list(found.ranks)} on "
        f"{count(len(found.clocks), 'host')}"
        + (f", steps {steps[0]} to {steps[-1]}" if steps else "")
    ]
    lines += [f"clock of {c.host}: {c.text} ({c.source})" for c in found.clocks.values()]
    lines += [f"clock of {c.host}: {c.warning}" for c in found.clocks.values() if c.warning]
    if found.missing:
        lines.append(
            f"{rank_list(found.missing)} {verb(found.missing, 'has', 'have')} left no dump here "
            f"and {verb(found.missing, 'is', 'are')} not in the trace: copy the dumps of all hosts "
            "into one folder, or set SMDDP_REPORT_DIR to one that all hosts share"
        )
    for line in found.ranks.values():
        if line.forgotten and math.isfinite(line.complete_from):
            lines.append(
                f"rank {line.rank}: complete from {(line.complete_from - found.zero) * 1e3:.3f} ms "
                f"on; {line.forgotten} operations before that are forgotten "
                "(SMDDP_DEBUG=flight_recorder=... holds more)"
            )
    return lines


def make(targets: Sequence[str]) -> Timeline:
    """The timeline of the dumps in files and folders, or of a running job that is asked for them.

    ``targets`` are paths, or one job or process; none: the one job that runs on this host.

    Raises:
        DumpError: there are none, or they do not fit together.
    """
    paths = [Path(target) for target in targets]
    absent = [path for path in paths if not path.exists()]
    if absent and len(paths) > 1:
        raise DumpError(f"{absent[0]} does not exist: give files or folders with dumps, or one job")
    if absent or not paths:
        try:
            paths = [ask(targets[0] if targets else "")]
        except DumpError as error:
            more = f", and {absent[0]} is no file or folder" if absent else ""
            raise DumpError(f"{error}{more}") from None
    return timeline(read(paths))
