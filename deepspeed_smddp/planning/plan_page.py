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
from deepspeed_smddp.planning.answer import Answer, Planned, host_bytes, interval, smddp_or_nccl
from deepspeed_smddp.planning.constants import COMPARED_SHARDED
from deepspeed_smddp.planning.recommendation import ds_config
from deepspeed_smddp.planning.step_time import beyond
from deepspeed_smddp.planning.training_job import Job

PREDICTED = (
    "Predicted, not measured. A range should hold 80 % of the published steps of a publisher that "
    "the planner was not fitted to: docs/dev/planner-validation.md. Most are of tuned code; one "
    "user's own took 1.3 to 1.6 times as long."
)
_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered layers",
    "activations": "activations",
    "working": "loss, or a layer",
    "buckets": "DeepSpeed's buckets",
    "step": "optimizer's step",
    "fragmentation": "fragmentation",
    "context": "CUDA and libraries",
}
_STEP = {
    "computing": "computing",
    "slowed": "slowed by collectives",
    "exposed_gathers": "gathers, not hidden",
    "exposed_reductions": "reductions, not hidden",
    "tensor": "tensor parallelism",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
_CHANGES = 6


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
    if answer.not_considered:
        _say(console, f"Not considered: {', '.join(answer.not_considered)}.")
    _work(console, shown, answer.tokens)
    _changes(console, answer)
    _curve(console, answer)
    _recommendation(console, answer)
    _say(console, PREDICTED, "dim")


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
    gpus = [p.job.gpus for p in answer.curve]
    low, high = zip(*(interval(p.model_tflops) for p in answer.curve), strict=True)
    axes.fill_between(gpus, low, high, color="#c8d9ea")
    axes.plot(gpus, [p.model_tflops for p in answer.curve], marker="o", color="#1f6fb4")
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs, the same batch per GPU")
    axes.set_ylabel("model TFLOPS per GPU, predicted, with its interval")
    axes.set_title(f"{shown.job.shape.name} on {shown.job.cluster.name}", fontsize=10)
    axes.grid(color="#eee")
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
    if scheme.ulysses > 1:
        words.append(f"SP {scheme.ulysses}")
    if scheme.expert > 1:
        words.append(f"EP {scheme.expert}")
    if scheme.offload:
        words.append(f"optimizer on {'NVMe' if scheme.nvme_optimizer else 'the CPU'}")
    if scheme.offload_param:
        words.append(f"parameters on {'NVMe' if scheme.offload_param == 'nvme' else 'the CPU'}")
    if job.lora_rank:
        words.append(f"LoRA of rank {job.lora_rank} on {job.base_bits} bits")
    if job.gpus > 1:
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
        f"{count(job.gpus, 'GPU')} {cluster.gpu.name} in {count(job.hosts, 'host')}"
        + (f" {cluster.name}" if cluster.name != cluster.gpu.name else "")
        + (f", {cluster.network_gbit:g} Gbit/s per host" if cluster.network_gbit else ""),
        describe(job),
        f"{job.tokens_per_step:,} tokens per step",
    ):
        _say(console, line)


def _does_not_fit(console: Console, answer: Answer) -> None:
    asked, best = answer.asked, answer.best
    assert answer.shown is not None
    memory = _gb(answer.shown.job.cluster.gpu.memory_bytes)
    if asked is not None:
        missing = _gb(asked.memory.low - asked.job.cluster.gpu.memory_bytes)
        text = f"This config does not fit: a GPU of {memory} lacks at least {missing}."
    else:
        text = f"No configuration surely fits {count(answer.question.gpus, 'GPU')} of {memory}."
    _say(console, text, "red")
    if best is not None:
        _say(
            console, f"The nearest that fits: {count(best.job.gpus, 'GPU')}, {describe(best.job)}."
        )
    console.print()


def _memory_and_step(console: Console, plan: Planned) -> None:
    memory = _table("Memory of a GPU", "")
    for name, words in _MEMORY.items():
        part = plan.memory.parts.get(name)
        if part is not None:
            memory.add_row(words, _range(part.low, part.high))
    memory.add_section()
    memory.add_row("together", _range(plan.memory.low, plan.memory.high))
    memory.add_row(f"of {_gb(plan.job.cluster.gpu.memory_bytes)}", plan.verdict)
    step = _table("One step", "")
    total = plan.step.total
    for name, words in _STEP.items():
        value = float(getattr(plan.step, name))
        if value >= 0.0005 * total:
            step.add_row(words, f"{value / total * 100:3.0f} %")
    step.add_section()
    step.add_row("together", _seconds(total))
    both = Table.grid(padding=(0, 2))
    both.add_row(memory, step)
    console.print()
    console.print(both)
    for name, part in plan.memory.host.items():
        _say(console, f"A host's memory: {_gb(part.high)} for {name} ({part.why}).")
    if plan.memory.nvme:
        _say(console, f"NVMe of a host: {_gb(plan.memory.nvme)}.")


def _work(console: Console, plan: Planned, tokens: float) -> None:
    job = plan.job
    table = Table.grid(padding=(0, 2))
    peak = job.cluster.gpu.flops(job.software.precision) / 1e12
    table.add_row(
        "TFLOPS per GPU",
        f"{_between(plan.model_tflops)} of the model, {_between(plan.model_tflops / peak * 100)} % "
        "of the peak",
    )
    table.add_row("Tokens per second", _between(job.tokens_per_step / plan.step.total))
    sent = host_bytes(job)
    if sent:
        table.add_row("A host sends", f"{_gb(sent)} per step at least")
    if job.gpus > 1:
        table.add_row("smddp or NCCL", smddp_or_nccl(job))
    if job.scheme.offload:
        words = "of two publishers' steps, one's took three times the predicted"
        table.add_row("Optimizer on the CPU", words)
    if beyond(job):
        words = "; ".join(beyond(job))
        table.add_row("Not compared", f"no published row has {words}: the range may be too narrow")
    table.add_row("Limited by", plan.limit)
    training = plan.training(tokens)
    if training is not None:
        price = ""
        if training.price is not None:
            price = f", {_between(training.price)} by the price given"
        table.add_row(
            f"{_count(training.tokens)} tokens",
            f"{training.steps:,} steps, {_between(training.seconds / 86400)} days, "
            f"{_between(training.gpu_hours)} GPU hours{price}",
        )
    console.print(table)


def _changes(console: Console, answer: Answer) -> None:
    shown = answer.shown
    assert shown is not None
    if not answer.changes:
        return
    table = _table("One change", "Predicted speed", "Fits")
    gains = ((c, _five(shown.step.total / c.seconds)) for c in answer.changes)
    for change, gain in [(c, gain) for c, gain in gains if gain][:_CHANGES]:
        table.add_row(change.text, f"{gain:+d} %", "yes" if change.fits else "no")
    console.print()
    console.print(table)


def _curve(console: Console, answer: Answer) -> None:
    table = _table("GPUs", "Model TFLOPS per GPU", "Fits", right=0)
    for point in answer.curve:
        fits = "yes" if point.fits else "no"
        table.add_row(f"{point.job.gpus:,}", _between(point.model_tflops), fits)
    if not table.row_count:
        return
    console.print()
    _say(console, "With the same batch per GPU")
    console.print(table)
    if answer.curve[-1].job.gpus > COMPARED_SHARDED:
        words = f"Compared with published steps of up to {COMPARED_SHARDED:,} GPUs (ZeRO-3, FSDP)."
        _say(console, words, "dim")


def _recommendation(console: Console, answer: Answer) -> None:
    best, asked = answer.best, answer.asked
    console.print()
    if best is None:
        cluster = answer.question.cluster
        where = "up to 4,096 GPUs of this kind"
        if not cluster.network_gbit:
            most = count(cluster.gpus_per_host, "GPU")
            where = f"up to {most} in one host; with --network, several hosts are tried"
        _say(console, f"No full training that smddp plan knows fits, {where}.")
        return
    if asked is not None and asked.fits and best.job.gpus == asked.job.gpus:
        gain = _five(asked.step.total / best.step.total)
        if gain < 5:
            _say(console, "Nothing that smddp plan knows is predicted clearly faster and fits.")
            return
        _say(console, f"Predicted {gain} % faster: {describe(best.job)}")
    else:
        gpus = count(best.job.gpus, "GPU")
        _say(console, f"Recommended: {gpus}, {describe(best.job)}")
    if best.job.recomputation == "full":
        _say(console, "(recomputation is the model's: model.gradient_checkpointing_enable())")
    if best.job.scheme.degree and best.job.software.library == "smddp":
        _say(console, "(sharding within some ranks is smddp's: DeepSpeed 0.19 has it no longer)")
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


def _between(value: float, unit: str = "") -> str:
    """The interval of a predicted number, two digits each."""
    return f"{' to '.join(_digits(end) for end in interval(value))}{unit}"


def _digits(value: float) -> str:
    """A number with two digits that say something."""
    return f"{float(f'{value:.2g}'):,.10g}" if value else "0"


def _five(ratio: float) -> int:
    """Per cent above 1, by steps of 5."""
    return 5 * round((ratio - 1) * 20)


def _range(low: float, high: float) -> str:
    """0.1 GB, or 1.2 to 3.4 GB."""
    if _gb(low) == _gb(high):
        return _gb(high)
    return f"{low / 1e9:.1f} to {high / 1e9:.1f} GB"


def _seconds(value: float) -> str:
    return _between(value, " s") if value >= 1 else _between(value * 1e3, " ms")
