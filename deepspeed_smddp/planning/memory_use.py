"""Memory of one GPU by part, in bytes.

Model states: Rajbhandari et al., "ZeRO" (SC 2020), section 3 and Table 1: with mixed precision a
parameter takes 2 bytes, its gradient 2 and its Adam states 12. FSDP keeps 4, 4 and 8: the same sum.
Activations: Korthikanti et al., "Reducing Activation Recomputation" (2022), equations 1 to 6,
written for any width of the feed-forward network and any number of kv heads.
What DeepSpeed holds besides: runtime/zero/stage3.py and partitioned_param_coordinator.py of 0.19.8.
Compared with real steps on CPUs: benchmarks/plan_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepspeed_smddp.planning.model_shape import ModelShape
from deepspeed_smddp.planning.training_job import Job

# Context of CUDA, cuBLAS and the collective library's own buffers. An allowance, not measured.
CONTEXT_BYTES = 1.5e9
# Of all that torch's allocator hands out. An allowance, not measured.
FRAGMENTATION = 0.10
# Elements that the optimizer steps at a time: DeepSpeed's default of "sub_group_size".
SUB_GROUP = 1e9


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one GPU, the one with the most.

    ``gathered``: layers that are whole for a while. ``step_gradients``: of DeepSpeed's gradients in
    fp32, which exist while the optimizer steps, what is more than activations and gathered layers
    were before.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    buckets: float
    step_gradients: float
    fragmentation: float
    context: float

    @property
    def total(self) -> float:
        """All parts together."""
        return sum((float(getattr(self, part.name)) for part in fields(self)), 0.0)


def memory_use(job: Job, *, on_cpu: bool = False) -> MemoryUse:
    """What one GPU of the job needs.

    ``on_cpu``: ranks on CPUs. There is no allocator that keeps blocks and no context of CUDA; with
    smddp, two buckets of gradients take turns (``deepspeed/overlap.py``).
    """
    scheme, shape = job.scheme, job.shape
    own = _own_parameters(job)
    ranks = job.shard_ranks
    params = 2 * own / (ranks if scheme.stage == 3 else 1)
    grads = 2 * own / (ranks if scheme.stage >= 2 else 1)
    optimizer = 12 * own / (ranks if scheme.stage >= 1 else 1)
    if scheme.offload:
        optimizer = 0.0
    layer = shape.layer_parameters / scheme.tensor
    outside = shape.vocabulary * shape.hidden / scheme.tensor
    live, gathered, buckets, ahead = 0.0, 0.0, 0.0, 0.0
    deepspeed = job.software.framework == "deepspeed"
    if scheme.stage == 3:
        live = 2 * layer + outside
        if deepspeed:
            # The last layers of the forward pass are the first of the backward pass: they stay if
            # both uses together are within the reuse distance.
            live = max(live, job.buckets.max_reuse / 2)
        live = own if scheme.keep_gathered else min(live, own)
        gathered = 2 * live + 2 * max(layer, outside)  # parameters, and one layer's gradient
    if deepspeed:
        two = scheme.stage in (1, 2) or (on_cpu and job.software.library == "smddp")
        buckets = 2.0 * job.buckets.reduce * (2 if two else 1)
        if scheme.stage == 3:
            ahead = 2.0 * min(job.buckets.prefetch, own - live)
            buckets += ahead
    activations = _activations(job)
    # The output of the last layer in 2 bytes, in fp32 for the loss, and its gradient.
    tokens = shape.sequence * job.micro_batch
    logits = tokens * shape.vocabulary * (2.0 + 4.0 + 2.0) / scheme.tensor
    step = 0.0
    if deepspeed and scheme.stage == 3 and not scheme.offload:
        # Flattened in 2 bytes, then in 4 (``_prepare_fp32_grad_for_sub_group``).
        free = gathered + ahead + activations + logits
        step = max(0.0, 6 * min(own / ranks, SUB_GROUP) - free)
    parts = (params, grads, optimizer, gathered, activations, logits, buckets, step)
    if on_cpu:
        return MemoryUse(*parts, 0.0, 0.0)
    return MemoryUse(*parts, FRAGMENTATION * sum(parts), CONTEXT_BYTES)


def fits(job: Job, use: MemoryUse | None = None) -> bool:
    """Whether the GPU has the memory."""
    return (use or memory_use(job)).total <= job.cluster.gpu.memory_bytes


def _own_parameters(job: Job) -> float:
    """Parameters of one tensor- and pipeline-parallel part, the largest: it has an embedding."""
    shape, scheme = job.shape, job.scheme
    outside = shape.embedding_parameters
    if scheme.pipeline > 1 and not shape.tied:
        outside -= shape.vocabulary * shape.hidden
    return (job.stage_layers * shape.layer_parameters + outside) / scheme.tensor


def layer_activation_bytes(
    shape: ModelShape, micro_batch: int, tensor: int = 1, sequence_parallel: bool = False
) -> float:
    """One layer without the matrix of scores: s b h (34) for GPT, equation 1 without its 5as/h.

    GPT's layers have dropout masks (1 byte per element), gated ones have none.
    """
    tokens = shape.sequence * micro_batch
    mask = 0 if shape.gated else 1
    # Outside of the divided products: inputs of two norms, of attention and of the network.
    whole = 2 * (2 + 2) * shape.hidden + 2 * mask * shape.hidden
    attention = 2 * (2 * shape.q_width + 2 * shape.kv_width)
    network = (8 if shape.gated else 4) * shape.ffn
    divided = attention + network
    return tokens * (whole / (tensor if sequence_parallel else 1) + divided / tensor)


def score_bytes(shape: ModelShape, micro_batch: int, tensor: int = 1) -> float:
    """The matrices of scores of one layer: softmax's input and output in 2 bytes, a mask in 1."""
    return 5.0 * shape.heads * shape.sequence**2 * micro_batch / tensor


def _activations(job: Job) -> float:
    shape, scheme = job.shape, job.scheme
    layer = layer_activation_bytes(shape, job.micro_batch, scheme.tensor, scheme.sequence_parallel)
    scores = 0.0 if job.software.flash else score_bytes(shape, job.micro_batch, scheme.tensor)
    # While a layer's backward pass runs, the gradients of softmax's output and input as well.
    backward = 0.8 * scores
    inputs = 2.0 * shape.sequence * job.micro_batch * shape.hidden
    if scheme.sequence_parallel or scheme.partition_activations:
        inputs /= scheme.tensor
    # A stage of 1F1B holds as many micro-batches as there are stages, the first one: equation 4.
    layers = job.stage_layers * min(scheme.pipeline, job.accumulation)
    if job.recomputation == "none":
        return layers * (layer + scores) + backward
    if job.recomputation == "selective":
        return layers * layer + scores + backward
    kept = 2 * inputs if scheme.offload else layers * inputs
    return kept + layer + scores + backward
