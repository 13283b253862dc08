"""How long one training step takes, and what of its communication is hidden behind computing.

The schedule is DeepSpeed's and FSDP's: while a layer computes, the next one is gathered, and in the
backward pass the gradients of the previous one are reduced as well. A layer so takes the longer of
both, and a share of the shorter that the two can't overlap. NCCL's kernels also slow the layers
that they overlap with. Tensor-parallel AllReduces stand between computing and are not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepspeed_smddp.planning.collective_time import (
    RankGroup,
    all_gather,
    all_reduce,
    origin,
    reduce_scatter,
)
from deepspeed_smddp.planning.constants import Values, values
from deepspeed_smddp.planning.gpu_time import GpuTime, gpu_time
from deepspeed_smddp.planning.training_job import Job


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one GPU. The parts of ``total`` are disjoint.

    ``slowed``: what computing loses while NCCL's kernels run. ``hidden`` is communication behind
    computing; it is not a part of ``total``.
    """

    computing: float
    optimizer: float
    slowed: float
    exposed_gathers: float
    exposed_reductions: float
    tensor: float
    bubble: float
    hidden: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum((float(getattr(self, f.name)) for f in fields(self) if f.name != "hidden"), 0.0)


@dataclass(frozen=True)
class _Overlap:
    """Communication ``wire`` beside computing ``busy``, both in seconds."""

    exposed: float
    hidden: float
    slowed: float

    @staticmethod
    def of(wire: float, busy: float, job: Job, c: Values) -> _Overlap:
        if not job.software.overlapped:
            return _Overlap(wire, 0.0, 0.0)
        share = "overlap.deepspeed" if job.software.framework == "deepspeed" else "overlap.share"
        hidden = min(wire, busy) * c[share]
        contention = c["nccl.contention"] if job.software.library == "nccl" else 0.0
        return _Overlap(wire - hidden, hidden, contention * hidden)


def step_time(job: Job, c: Values | None = None) -> StepTime:
    """The time of one optimizer step of ``job``.

    Args:
        c: the constants; None: the published ones.
    """
    c = values() if c is None else c
    gpu = gpu_time(job, c)
    layers, micro = job.stage_layers, job.accumulation
    computing = micro * (
        layers * (gpu.layer_forward + gpu.layer_backward)
        + gpu.outside_forward
        + gpu.outside_backward
    )
    tensor = micro * layers * _tensor_per_layer(job, c)
    schedule = _sharded if job.scheme.stage == 3 else _replicated
    gathers, reductions = schedule(job, gpu, c)
    hidden = sum(o.hidden for o in (*gathers, *reductions))
    slowed = sum(o.slowed for o in (*gathers, *reductions))
    exposed_gathers = sum(o.exposed for o in gathers)
    exposed_reductions = sum(o.exposed for o in reductions)
    bubble = 0.0
    if job.scheme.pipeline > 1:
        # Narayanan et al., section 2.2: (p - 1) / (v m) of the step's own work.
        share = (job.scheme.pipeline - 1) / (job.scheme.chunks * micro)
        bubble = share * (computing + tensor)
    return StepTime(
        computing,
        gpu.optimizer,
        slowed,
        exposed_gathers,
        exposed_reductions,
        tensor,
        bubble,
        hidden,
    )


def communication_origin(job: Job) -> str:
    """Where the times of the collectives of a layer, or of a bucket of gradients, come from."""
    if job.scheme.stage == 3:
        layer = job.shape.layer_parameters / job.scheme.tensor
        gathered = job.software.parameter_bytes * layer
        reduced = job.software.gradient_bytes * layer
        return origin(gathered, reduced, _group(job, job.shard_ranks), values())
    own = job.shape.parameters / (job.scheme.tensor * job.scheme.pipeline)
    nbytes = job.software.gradient_bytes * min(own, job.buckets.reduce)
    return origin(nbytes, nbytes, _group(job, job.data_parallel), values())


def _tensor_per_layer(job: Job, c: Values) -> float:
    """AllReduces of tensor parallelism: two forward, two backward, two more if computed again."""
    scheme, shape = job.scheme, job.shape
    if scheme.tensor == 1:
        return 0.0
    nbytes = 2.0 * job.micro_batch * shape.sequence * shape.hidden
    once = all_reduce(nbytes, RankGroup(scheme.tensor, 1, job.cluster, "nccl"), c)
    times = 4 + (2 if job.recomputation == "full" else 0)
    left = c["tensor.async_exposed"] if scheme.async_tensor else 1.0
    return times * once * left


def _sharded(job: Job, gpu: GpuTime, c: Values) -> tuple[list[_Overlap], list[_Overlap]]:
    """ZeRO-3: a gather before every layer in both passes, a reduction after its backward pass."""
    scheme, shape = job.scheme, job.shape
    group = _group(job, job.shard_ranks)
    parameter = job.software.parameter_bytes
    gradient = job.software.gradient_bytes
    layer = shape.layer_parameters / scheme.tensor
    outside = shape.embedding_parameters / scheme.tensor / scheme.pipeline
    layers, micro = job.stage_layers, job.accumulation
    gather = all_gather(parameter * layer, group, c)
    reduce = reduce_scatter(gradient * layer, group, c)
    forward = _Overlap.of(gather, gpu.layer_forward, job, c)
    early, late = _replica_all_reduce(job, group, c)
    again = 0.0 if scheme.keep_gathered else gather
    first = all_gather(parameter * outside, group, c)
    last = reduce_scatter(gradient * outside, group, c)
    gathers = [_scaled(forward, micro * layers), _Overlap(micro * first, 0.0, 0.0)]
    reductions = [_Overlap(micro * last, 0.0, 0.0), _Overlap(late, 0.0, 0.0)]
    # The last micro-step's backward pass also carries the replica all-reduce.
    for times, averaged in ((micro - 1, 0.0), (1, early / layers)):
        # One network carries both directions' worth: what a layer needs follows one another.
        wire = again + reduce + averaged
        backward = _Overlap.of(wire, gpu.layer_backward, job, c)
        part = again / wire if wire else 0.0
        gathers.append(_scaled(backward, times * layers * part))
        reductions.append(_scaled(backward, times * layers * (1 - part)))
    return gathers, reductions


def _replica_all_reduce(job: Job, group: RankGroup, c: Values) -> tuple[float, float]:
    """MiCS's AllReduces over the replicas: what may overlap the last backward pass, and the rest.

    smddp in DeepSpeed averages bucket by bucket. The last bucket is full when the pass is over.
    With an offloaded optimizer all of it waits for the step.
    """
    copies = job.data_parallel // group.ranks
    if copies == 1:
        return 0.0, 0.0
    own = job.shape.parameters / job.scheme.tensor
    nbytes = job.software.gradient_bytes * own / group.ranks
    across = group._replace(ranks=copies, spacing=group.ranks * group.spacing)
    software = job.software
    early = software.library == "smddp" and software.framework == "deepspeed"
    if not early or not software.overlapped or job.scheme.offload:
        return 0.0, all_reduce(nbytes, across, c)
    buckets = max(1.0, own / job.buckets.reduce)
    whole = all_reduce(nbytes, across, c, buckets)
    return whole * (1 - 1 / buckets), whole / buckets


def _replicated(job: Job, gpu: GpuTime, c: Values) -> tuple[list[_Overlap], list[_Overlap]]:
    """DDP and ZeRO-1, 2: gradients are reduced in the last backward pass, parameters gathered."""
    scheme, group = job.scheme, _group(job, job.data_parallel)
    if group.ranks == 1:
        return [], []
    own = job.shape.parameters / (scheme.tensor * scheme.pipeline)
    grads = job.software.gradient_bytes * own
    busy = job.stage_layers * gpu.layer_backward
    calls = max(1.0, own / job.buckets.reduce)
    whole = scheme.stage == 0 or job.shard_ranks < group.ranks
    wire = (all_reduce if whole else reduce_scatter)(grads, group, c, calls)
    gathers = []
    if scheme.stage:
        after = all_gather(2 * own, _group(job, job.shard_ranks), c, calls)
        gathers.append(_Overlap(after * c["zero1.exposed_gather"], after, 0.0))
    return gathers, [_Overlap.of(wire, busy, job, c)]


def _group(job: Job, ranks: int) -> RankGroup:
    """So many data-parallel ranks of the job."""
    return RankGroup(ranks, job.scheme.tensor, job.cluster, job.software.library)


def _scaled(of: _Overlap, times: float) -> _Overlap:
    return _Overlap(of.exposed * times, of.hidden * times, of.slowed * times)
