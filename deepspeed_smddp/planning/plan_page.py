"""The page of ``smddp plan``, for a terminal of 80 columns, and the curve as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.report.wording import count
from deepspeed_smddp.planning.answer import Answer, Planned, host_bytes
from deepspeed_smddp.planning.recommendation import ds_config
from deepspeed_smddp.planning.step_time import coding, communication_origin
from deepspeed_smddp.planning.training_job import Job

NOT_SHOWN = "It has not run on hardware; errors: docs/dev/planner-validation.md."
_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered layers",
    "activations": "activations",
    "logits": "logits and loss",
    "buckets": "DeepSpeed's buckets",
    "step_gradients": "fp32 gradients",
    "fragmentation": "fragmentation, 10 %",
    "context": "CUDA and libraries",
}
_STEP = {
    "computing": "computing",
    "slowed": "slowed by NCCL",
    "exposed_gathers": "gathers, not hidden",
    "exposed_reductions": "reductions, not hidden",
    "tensor": "tensor parallelism",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
_CHANGES = 6
PUBLISHED_GPUS = 1024  # of the largest ZeRO-3 row in docs/dev/planner-validation.md


def show(console: Console, answer: Answer) -> None:
    """Prints the page."""
    shown = answer.shown
    if shown is None:
        _recommendation(console, answer)
        return
    if not answer.fits:
        _does_not_fit(console, answer)
    _head(console, shown)
    _memory_and_step(console, shown)
    _work(console, shown, answer.tokens)
    _changes(console, answer)
    _curve(console, answer)
    _recommendation(console, answer)
    _say(console, NOT_SHOWN, "dim")


def draw(answer: Answer, path: Path) -> None:
    """Writes the curve to 4,096 GPUs as a picture.

    Raises:
        CommandError: the file can't be written.
    """
    from matplotlib.figure import Figure

    shown = answer.shown
    assert shown is not None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for library, name, colour in (("smddp", "smddp", "#c8401c"), ("nccl", "NCCL", "#1f6fb4")):
        points = [p for p in answer.curve if p.job.software.library == library]
        tflops = [p.model_tflops for p in points]
        axes.plot([p.job.gpus for p in points], tflops, marker="o", color=colour, label=name)
    gpus = sorted({p.job.gpus for p in answer.curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs, the same batch per GPU")
    axes.set_ylabel("model TFLOPS per GPU, predicted")
    axes.set_title(f"{shown.job.shape.name} on {shown.job.cluster.name}", fontsize=10)
    axes.grid(color="#eee")
    axes.legend(frameon=False)
    output_files.save_picture(figure, path, dpi=120)


def describe(job: Job) -> str:
    """A configuration in one line."""
    scheme = job.scheme
    words = [f"ZeRO-{scheme.stage}" if scheme.stage else "DDP"]
    if scheme.stage and scheme.degree:
        words.append(f"within {scheme.degree} ranks")
    if scheme.tensor > 1:
        words.append(f"TP {scheme.tensor}")
    if scheme.pipeline > 1:
        words.append(f"PP {scheme.pipeline}")
    if scheme.offload:
        words.append("optimizer on the CPU")
    words.append("by smddp" if job.software.library == "smddp" else "by NCCL")
    again = "no" if job.recomputation == "none" else job.recomputation
    batch = f"micro-batch {job.micro_batch} x {job.accumulation}"
    return f"{' '.join(words)}, {batch}, {again} recomputation"


def _head(console: Console, plan: Planned) -> None:
    job = plan.job
    shape, cluster = job.shape, job.cluster
    for line in (
        f"{shape.name}: {shape.parameters / 1e9:.3g} billion parameters, "
        f"{shape.sequence} tokens per sequence",
        f"{job.gpus} GPUs {cluster.gpu.name} in {count(job.hosts, 'host')} {cluster.name}, "
        f"{cluster.network_rate * 8e-9:g} Gbit/s per host",
        describe(job),
        f"{job.tokens_per_step:,} tokens per step",
    ):
        _say(console, line)


def _does_not_fit(console: Console, answer: Answer) -> None:
    asked, best = answer.asked, answer.best
    assert answer.shown is not None
    memory = _gb(answer.shown.job.cluster.gpu.memory_bytes)
    if asked is not None:
        missing = _gb(asked.memory.total - asked.job.cluster.gpu.memory_bytes)
        text = f"This config does not fit: a GPU of {memory} lacks {missing}."
    else:
        text = f"No configuration fits {answer.gpus} GPUs of {memory}."
    _say(console, text, "red")
    if best is not None:
        _say(console, f"The nearest that fits: {best.job.gpus} GPUs, {describe(best.job)}.")
    console.print()


def _memory_and_step(console: Console, plan: Planned) -> None:
    memory = _table("Memory of a GPU", "")
    for name, words in _MEMORY.items():
        value = float(getattr(plan.memory, name))
        if value:
            memory.add_row(words, _gb(value))
    memory.add_section()
    of = _gb(plan.job.cluster.gpu.memory_bytes)
    memory.add_row("together", f"{plan.memory.total / 1e9:.1f} of {of}")
    step = _table("One step", "")
    total = plan.step.total
    for name, words in _STEP.items():
        value = float(getattr(plan.step, name))
        if value >= 0.0005 * total:
            step.add_row(words, f"{_seconds(value)}  {value / total * 100:3.0f} %")
    step.add_section()
    step.add_row("together", f"{_seconds(total)}  100 %")
    step.add_row("hidden communication", f"{_seconds(plan.step.hidden)}       ")
    both = Table.grid(padding=(0, 2))
    both.add_row(memory, step)
    console.print()
    console.print(both)


def _work(console: Console, plan: Planned, tokens: float) -> None:
    job = plan.job
    table = Table.grid(padding=(0, 2))
    share = plan.model_tflops * 1e12 / job.cluster.gpu.flops(job.software.precision) * 100
    table.add_row(
        "TFLOPS per GPU",
        f"{plan.model_tflops:.1f} of the model ({share:.0f} % of the peak), "
        f"{plan.hardware_tflops:.1f} with recomputation",
    )
    table.add_row("Tokens per second", f"{job.tokens_per_step / plan.step.total:,.0f}")
    sent = host_bytes(job)
    if sent:
        rate = sent / plan.step.total * 8e-9
        table.add_row(
            "A host sends",
            f"{_gb(sent)} per step, {rate:.0f} Gbit/s on average of "
            f"{job.cluster.network_rate * 8e-9:g}",
        )
        table.add_row("Communication", communication_origin(job))
        if coding(job):
            table.add_row("Coding", coding(job))
    table.add_row("Limited by", plan.limit)
    training = plan.training(tokens)
    if training is not None:
        price = "" if training.price is None else f", {training.price:,.0f} by the price given"
        table.add_row(
            f"{_count(training.tokens)} tokens",
            f"{training.steps:,} steps, {training.seconds / 86400:.1f} days, "
            f"{training.gpu_hours:,.0f} GPU hours{price}",
        )
    console.print(table)


def _changes(console: Console, answer: Answer) -> None:
    shown = answer.shown
    assert shown is not None
    if not answer.changes:
        return
    table = _table("One change", "Step", "Faster by", "Fits")
    gains = ((c, (shown.step.total / c.seconds - 1) * 100) for c in answer.changes)
    for change, gain in [(c, gain) for c, gain in gains if abs(gain) >= 1][:_CHANGES]:
        table.add_row(
            change.text, _seconds(change.seconds), f"{gain:+.0f} %", "yes" if change.fits else "no"
        )
    console.print()
    console.print(table)


def _curve(console: Console, answer: Answer) -> None:
    table = _table("GPUs", "smddp", "NCCL", "smddp faster by", right=0)
    by = {(p.job.gpus, p.job.software.library): p.model_tflops for p in answer.curve}
    for gpus in sorted({p.job.gpus for p in answer.curve}):
        ours, theirs = by.get((gpus, "smddp")), by.get((gpus, "nccl"))
        if ours and theirs:
            row = (f"{ours:.1f}", f"{theirs:.1f}", f"{(ours / theirs - 1) * 100:+.0f} %")
            table.add_row(str(gpus), *row)
    if table.row_count:
        console.print()
        _say(console, "Model TFLOPS per GPU, with the same batch per GPU")
        console.print(table)
        extended = [p.job.gpus for p in answer.curve if "extended" in communication_origin(p.job)]
        if extended:
            which = " to ".join(dict.fromkeys(f"{n:,}" for n in (extended[0], extended[-1])))
            words = "smddp's communication is partly beyond the simulations: see --json."
            _say(console, f"With {which} GPUs, {words}", "dim")
        if max(p.job.gpus for p in answer.curve) > PUBLISHED_GPUS:
            most = f"{PUBLISHED_GPUS:,} GPUs"
            _say(console, f"No published ZeRO-3 figure is of more than {most}.", "dim")


def _recommendation(console: Console, answer: Answer) -> None:
    best, asked = answer.best, answer.asked
    console.print()
    if best is None:
        _say(console, "Nothing that smddp plan knows fits, up to 4,096 GPUs of this kind.")
        return
    if asked is not None and asked.fits and best.job.gpus == asked.job.gpus:
        gain = (asked.step.total / best.step.total - 1) * 100
        if gain < 1:
            _say(console, "Nothing that smddp plan knows is faster and fits.")
            return
        _say(console, f"Recommended, {gain:.0f} % faster: {describe(best.job)}")
    else:
        _say(console, f"Recommended: {best.job.gpus} GPUs, {describe(best.job)}")
    if best.job.recomputation == "full":
        _say(console, "(recomputation is the model's: model.gradient_checkpointing_enable())")
    console.print(Text(json.dumps(ds_config(best.job), indent=2)), soft_wrap=True)


def _table(first: str, *others: str, right: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column(first, justify="left" if right else "right", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say(console: Console, text: str, style: str = "") -> None:
    """Prints a text as it is, without rich's markup."""
    console.print(Text(text, style))


def _count(value: float) -> str:
    """2T, 300B, 5M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.0f}"


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 5e7 else f"{value / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
