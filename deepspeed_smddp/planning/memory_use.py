"""Memory of a job by part, in bytes: counted by the frameworks' own rules, as a range.

Where the question leaves something open (which kernels, which loss, how much the allocator loses),
``low`` is the leanest that the framework does and ``high`` the plainest; ``why`` says which rule.
No number here is fitted. Sources:

* Model states: Rajbhandari et al., "ZeRO" (SC 2020), Table 1; DeepSpeed 0.19.8,
  runtime/zero/stage_1_and_2.py and stage3.py; Megatron-LM, docs/source/api-guide/dist_optimizer.md.
* Activations: Korthikanti et al., "Reducing Activation Recomputation" (2022), section 4, for any
  width, number of kv heads and kind of norm; with FlashAttention the scores give way to 4 bytes per
  head and token (Dao et al., 2022, algorithm 1). Selective recomputation: Megatron's repeats the
  attention, torchtitan's ("op") every second matrix product (distributed/activation_checkpoint.py).
* Gathers: DeepSpeed's partitioned_param_coordinator.py; PyTorch FSDP gathers a layer ahead.

Compared with real steps on CPUs (benchmarks/plan_memory.py), with published runs that ran and with
reports of memory that ran out (benchmarks/plan_refusals.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepspeed_smddp.planning.model_shape import ModelShape
from deepspeed_smddp.planning.training_job import Job, Software

Verdict = Literal["fits", "at the edge", "does not fit"]

# CUDA's context, cuBLAS and the collective library: what processes of reports had in use besides
# what torch had reserved (benchmarks/planning/published_out_of_memory.csv: 0.4 to 1.9 GB).
CONTEXT = (0.4e9, 2.0e9)
# Of all that torch's allocator hands out, what it can't use; none with expandable segments. An
# allowance: reports have 0 to 10 %, and more only with blocks of very different sizes.
FRAGMENTATION = 0.10
# QLoRA (Dettmers et al., 2023): 4 bits, a constant in 8 bits per 64, one in 32 bits per 64 x 256.
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
_BASE = {4: _NF4, 8: 1.0, 16: 2.0}
# Vectors that an optimizer keeps per parameter, besides the parameters in fp32. 1-bit optimizers
# also keep the error of what they compressed.
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "lamb"), 2),
    **dict.fromkeys(("lion", "adagrad", "muon"), 1),
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), 3),
    "sgd": 0,
}


class Part(NamedTuple):
    """One part of the memory. ``why``: the rule that it is counted by, and what is open."""

    low: float
    high: float
    why: str

    def times(self, factor: float) -> Part:
        """So many of it."""
        return Part(self.low * factor, self.high * factor, self.why)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the GPU with the most, by part; ``host``: of a host's memory, ``nvme``: its disks.

    The parts are those of the fullest moment of a step: the loss, a layer's backward pass, or the
    optimizer's step.
    """

    parts: Mapping[str, Part]
    host: Mapping[str, Part]
    nvme: float

    @property
    def low(self) -> float:
        """All parts, where everything open turns out lean."""
        return sum(part.low for part in self.parts.values())

    @property
    def high(self) -> float:
        """All parts, where everything open turns out plain."""
        return sum(part.high for part in self.parts.values())

    def verdict(self, capacity: float) -> Verdict:
        """Whether it fits: surely, perhaps, or surely not."""
        if self.high <= capacity:
            return "fits"
        return "at the edge" if self.low <= capacity else "does not fit"


def fits(job: Job, use: MemoryUse | None = None) -> bool:
    """Whether the GPU surely has the memory."""
    return verdict(job, use) == "fits"


def verdict(job: Job, use: MemoryUse | None = None) -> Verdict:
    """Whether the job fits its GPUs."""
    return (use or memory_use(job)).verdict(job.cluster.gpu.memory_bytes)


def memory_use(job: Job, *, on_cpu: bool = False) -> MemoryUse:
    """What one GPU, and one host, of the job needs.

    ``on_cpu``: ranks on CPUs. There is no allocator that keeps blocks and no context of CUDA; the
    kernels are plain; with smddp, two buckets of gradients take turns (``deepspeed/overlap.py``).
    """
    counted = _Count(job, on_cpu)
    parts = {
        "parameters": counted.parameters(),
        "gradients": counted.gradients(),
        "optimizer": counted.optimizer(),
        "gathered": counted.gathered(),
        "activations": counted.kept(),
        "working": counted.working(),
        "buckets": counted.buckets(),
    }
    parts["step"] = counted.step(parts)
    if not on_cpu:
        all_of_it = sum(part.high for part in parts.values())
        why = "what torch's allocator can't use: none with expandable segments, to 10 %"
        parts["fragmentation"] = Part(0.0, FRAGMENTATION * all_of_it, why)
        parts["context"] = Part(*CONTEXT, "CUDA, cuBLAS and the collective library")
    host, nvme = counted.off_gpu()
    return MemoryUse({n: p for n, p in parts.items() if p.high}, host, nvme)


class _Count:
    """The parts of one job."""

    def __init__(self, job: Job, on_cpu: bool) -> None:
        self.job, self.on_cpu = job, on_cpu
        self.scheme, self.shape, self.software = job.scheme, job.shape, job.software
        self.deepspeed = job.software.framework == "deepspeed"
        self.own = job.rank_parameters
        self.trained = job.trained_parameters
        # Fewer ranks share an expert than hold a part of the others: a shard is no smaller.
        self.ranks = job.shard_ranks
        self.shard = (self.trained if job.lora_rank else job.all_experts_parameters) / self.ranks
        self.sharded = self.ranks if self.scheme.stage == 3 else 1
        self.tokens = job.shape.sequence * job.micro_batch / self.scheme.ulysses
        self.layer = job.rank_layer_parameters
        self.outside = self.shape.vocabulary * self.shape.hidden / self.scheme.tensor
        fused = not on_cpu and (self.software.compiled or self.software.framework == "megatron")
        self.kernels = (on_cpu, not fused)  # of the low and of the high end: plain?

    # ---- model states

    def parameters(self) -> Part:
        job = self.job
        fp32 = self.software.precision == "fp32" or self.software.framework in ("fsdp", "fsdp2")
        if self.job.lora_rank:
            whole = self.job.unquantized_parameters
            each = (self.own - whole) * _BASE[self.job.base_bits] + 2 * whole
            why = f"the base in {self.job.base_bits} bits, norms and embeddings in 16"
        else:
            each, why = (4.0 if fp32 else 2.0) * self.own, "fp32" if fp32 else "16 bits"
        sharded = self.scheme.stage == 3
        experts = job.all_experts_parameters / self.own
        size = each * experts / self.ranks if sharded else each
        if self.scheme.offload_param:
            size, why = 0.0, f"on {'NVMe' if self.scheme.offload_param == 'nvme' else 'the host'}"
        if sharded and self.deepspeed and self.shape.hidden <= job.buckets.persistence:
            size += 2.0 * job.stage_layers * self.shape.layer_vectors / self.scheme.tensor
            why += "; vectors persist whole"
        high = size
        if sharded and self.deepspeed and job.base_bits < 16:
            high = each
            why += "; whole on each rank unless the quantized storage has a type of 16 bits"
        if self.scheme.hpz > 1:
            copy = 2 * self.own / self.scheme.hpz
            size, high = size + copy, high + copy
            why += f"; a second copy over {self.scheme.hpz} ranks (hpZ)"
        if self.software.precision == "fp8" and self.software.framework == "megatron":
            high += 2 * self.own / (self.ranks if sharded else 1)
            why += "; in fp8 besides, and transposed, if not kept in fp8 alone"
        return Part(size, high, why)

    def gradients(self) -> Part:
        framework = self.software.framework
        low = high = 2.0
        why = "16 bits"
        if framework in ("fsdp", "fsdp2") or self.software.precision == "fp32":
            low, high, why = 4.0, 4.0, "fp32"
            if self.scheme.stage == 0:
                high, why = 8.0, "fp32; DDP's buckets are copies, or views of them"
        elif framework == "megatron":
            high, why = 4.0, "fp16, or fp32 with bf16"
        if self.job.lora_rank and framework in ("fsdp", "fsdp2"):
            low = 2.0
        elif self.software.fp32_accumulation and self.deepspeed:
            low, high, why = 4.0, 4.0, "data_types.grad_accum_dtype"
        lows = highs = self.trained
        if self.scheme.stage >= 2:
            lows = highs = self.shard
            if self.scheme.offload and self.deepspeed:
                # stage_1_and_2.py and stage3.py: the partition's gradients are the host's.
                lows = highs = 0.0
        elif self.scheme.stage == 1 and self.deepspeed and self.software.overlap_comm:
            lows = self.shard
            why += "; reduced as they come in the last micro-batch, whole with more than one"
            if self.job.accumulation > 1:
                lows = self.trained
        low, high = low * lows, high * highs
        if self.software.no_sync and self.job.accumulation > 1:
            # FSDP.no_sync: "the full model gradients" wait for the last micro-batch, in 16 bits.
            low, high = low + 2.0 * self.trained, high + 2.0 * self.trained
            why += "; whole between micro-batches (no_sync)"
        if framework == "fsdp2" and self.scheme.pipeline > 1 and self.job.accumulation > 1:
            # FSDPParam.unsharded_accumulated_grad: in the type of the reduction, fp32.
            low, high = low + 4.0 * self.trained, high + 4.0 * self.trained
            why += "; whole between the micro-batches of a pipeline"
        return Part(low, high, why)

    def optimizer(self) -> Part:
        states = optimizer_bytes(self.software)
        fp32_already = self.software.framework in ("fsdp", "fsdp2")
        if self.software.precision == "fp32" and self.scheme.stage == 0:
            fp32_already = True
        master = 0 if fp32_already else self.software.master_bytes
        each = states + master
        why = f"{self.software.optimizer}'s states"
        if master:
            why += f", and weights in {master} bytes"
        on_gpu = 1.0 - (self.scheme.offload_ratio if self.scheme.offload else 0.0)
        if not on_gpu:
            why = "on the host" if not self.scheme.nvme_optimizer else "on NVMe"
        low = each
        if self.software.framework == "megatron" and self.scheme.stage:
            # store_param_remainders of apex's and Transformer Engine's Adam, NeMo's default.
            low, why = each - 2.0, why + ", 2 of them only with store_param_remainders"
        size = on_gpu * (self.shard if self.scheme.stage else self.trained)
        return Part(low * size, each * size, why)

    # ---- what is whole for a while

    def _largest_matrix(self) -> float:
        return max(self.shape.largest_matrix / self.scheme.tensor, self.outside)

    def gathered(self) -> Part:
        if self.scheme.stage != 3 or self.ranks == 1:
            return Part(0.0, 0.0, "")
        wide = _BASE[self.job.base_bits]
        if self.scheme.keep_gathered:
            low = high = self.own
            why = "parameters stay from the forward to the backward pass"
        elif self.deepspeed:
            low, high = self._live()
            why = "the module at work and what is prefetched or soon used again"
        else:
            low = min(self.own, self.layer + self.outside)
            high = min(self.own, 2 * self.layer + 2 * self.outside)
            why = "the layer at work, the next one, and the root's own parameters"
        gradient = self._largest_matrix() if self.deepspeed else max(self.layer, self.outside)
        most = max(self.layer, self.outside)
        reduced = 2.0 if self.deepspeed else 6.0  # FSDP2 reduces in fp32 by default
        if self.job.lora_rank:
            gradient = most = 0.0
        code = 1.0 if self.scheme.quantized_weights else 0.0  # qwZ: the int8 form of what arrives
        return Part(
            (wide + code) * low + 2 * gradient,
            (wide + code) * high + reduced * most,
            why + "; one layer's gradient",
        )

    def _live(self) -> tuple[float, float]:
        """DeepSpeed's whole parameters at a time, at least and at most.

        A module is gathered when it starts and released when it ends, unless it is used again
        within "stage3_max_reuse_distance"; prefetching stops at "stage3_max_live_parameters". The
        last layers of the forward pass are the first of the backward pass: they stay if both uses
        together are within the distance.
        """
        buckets = self.job.buckets
        matrix = self._largest_matrix()
        ahead = min(buckets.prefetch, buckets.max_live)
        two = min(2 * self.layer + self.outside, max(buckets.max_live, matrix))
        high = max(two, buckets.max_reuse / 2, matrix + ahead)
        return min(self.own, matrix + ahead), min(self.own, high)

    def buckets(self) -> Part:
        if not self.deepspeed or not self.scheme.stage:
            return Part(0.0, 0.0, "")
        scheme, buckets = self.scheme, self.job.buckets
        # Never more than the gradients there are; a bucket is as large as its key says.
        two = (scheme.stage < 3 and self.software.overlap_comm) or (
            self.on_cpu and self.software.library == "smddp" and scheme.stage == 3
        )
        wire = 4.0 if self.software.precision == "fp32" else 2.0
        size = wire * buckets.reduce * (2 if two else 1)
        if not self.software.contiguous_gradients:
            size = wire * min(buckets.reduce, self.trained)
        why = "reduce_bucket_size" + (", twice with overlap_comm" if two else "")
        if scheme.quantized_gradients:
            size *= 1.5  # qgZ: the codes and their scales beside the bucket
            why += ", and qgZ's codes"
        low = size
        if scheme.stage == 3:
            live, _ = self._live()
            size += 2.0 * min(buckets.prefetch, max(0.0, self.own - live))
            why += ", stage3_prefetch_bucket_size"
        elif scheme.offload:
            largest = 2.0 * self._largest_matrix()
            low, size = low + largest, size + largest
            why += ", the largest parameter on its way to the host"
        return Part(low, size, why)

    # ---- activations

    def _layers_ends(self) -> tuple[float, float]:
        """Bytes that one layer keeps, at least and at most."""
        job, scheme = self.job, self.scheme

        def bytes_(plain: bool, rank: int = 0) -> float:
            return layer_activation_bytes(
                self.shape,
                self.tokens,
                scheme.tensor,
                scheme.sequence_parallel,
                plain=plain,
                masks=plain and not self.on_cpu and not job.counted_layer,
                fp8=self.software.precision == "fp8" and not plain,
                adapters=rank,
                gathered_inputs=self.software.framework == "fsdp2",
            )

        low, high = (bytes_(plain) for plain in self.kernels)
        if job.counted_layer:
            # The count knows no tensor parallelism, the formula the part of a rank.
            counted = (
                job.counted_layer * bytes_(True) / layer_activation_bytes(self.shape, 1, plain=True)
            )
            low, high = min(low, counted), counted if self.kernels[1] else high
        if job.lora_rank:
            high += bytes_(False, job.lora_rank) - bytes_(False)
        return low, high

    def _scores(self) -> float:
        if self.software.flash:
            return 0.0
        return score_bytes(
            self.shape, self.job.micro_batch, self.scheme.tensor, self.scheme.ulysses
        )

    def kept(self) -> Part:
        """What the forward pass leaves for the backward pass, and a repeated layer."""
        job, scheme = self.job, self.scheme
        inputs = 2.0 * self.tokens * self.shape.hidden
        if scheme.sequence_parallel or scheme.partition_activations:
            inputs /= scheme.tensor
        # A stage of 1F1B holds as many micro-batches as there are stages, the first one: equation
        # 4; interleaved, (p - 1) / (p m) more: section 4.2.3.
        flying: float = min(scheme.pipeline, job.accumulation)
        if scheme.pipeline > 1 and scheme.chunks > 1:
            flying *= 1 + (scheme.pipeline - 1) / (scheme.pipeline * scheme.chunks)
        layers = job.stage_layers * flying
        ends = self._layers_ends()
        scores = self._scores()
        if job.recomputation == "none":
            return Part(layers * (ends[0] + scores), layers * (ends[1] + scores), "every layer's")
        if job.recomputation == "selective":
            if self.software.framework == "fsdp2":
                saved = selected_bytes(self.shape, self.tokens, scheme.tensor)
                why = "inputs of layers and every second product (torchtitan)"
                low = layers * saved + max(0.0, ends[0] - saved)
                return Part(low, layers * saved + max(0.0, ends[1] - saved), why)
            why = "every layer's without the scores, and one layer's scores"
            return Part(layers * ends[0] + scores, layers * ends[1] + scores, why)
        kept = 2 * inputs if scheme.offload_activations else layers * inputs
        return Part(kept, kept, "inputs of layers")

    def working(self) -> Part:
        """The larger of two moments: the loss, and a layer's backward pass."""
        elements = self.tokens * self.shape.vocabulary / self.scheme.tensor
        low, high = self._loss_bytes()
        shape, tensor = self.shape, self.scheme.tensor
        # Gradients of what a layer's network and its input have; of softmax's output and input.
        narrow = self.tokens * (2 * shape.hidden + 2 * shape.active_ffn / tensor)
        wide = self.tokens * (4 * shape.hidden + 6 * shape.active_ffn / tensor)
        back = 0.8 * self._scores()
        again = [0.0, 0.0]
        if self.job.recomputation == "full":
            again = [of + self._scores() for of in self._layers_ends()]
        # Gradients that the backward pass makes are not there yet at the loss.
        later = Part(0.0, 0.0, "")
        if self.job.accumulation == 1 and not (self.deepspeed and self.scheme.stage == 3):
            later = self.gradients()
        return Part(
            max(low * elements - later.low, again[0] + narrow + back),
            max(high * elements - later.high, again[1] + wide + back),
            "the loss over all words, or a layer's backward pass",
        )

    def _loss_bytes(self) -> tuple[float, float]:
        """Bytes per logit, at least and at most.

        In 2 bytes, and a gradient of 2 with a fused loss. Plain, in the backward pass:
        log_softmax's output, the gradient of nll_loss and its own, in fp32; the caller may hold the
        model's output besides. torchtitan drops it, and fuses the loss only where it compiles; its
        loss over divided logits has four such tensors (torch/distributed/tensor/parallel/loss.py).
        Megatron's vocabulary-parallel loss works in place.
        """
        framework = self.software.framework
        if self.software.precision == "fp32":
            return 12.0, 16.0
        if framework == "megatron":
            return 6.0, 10.0
        if framework == "fsdp2":
            plain = 16.0 if self.scheme.tensor > 1 else 12.0
            return (4.0 if self.software.compiled else plain), plain
        return (12.0, 12.0) if self.on_cpu else (4.0, 14.0)

    # ---- the optimizer's step

    def step(self, parts: Mapping[str, Part]) -> Part:
        """What the step needs beyond what the passes have freed by then."""
        scheme = self.scheme
        own = self.shard if scheme.stage else self.trained
        free = [parts[n] for n in ("gathered", "activations", "working", "buckets")]
        on_gpu = 1.0 - (scheme.offload_ratio if scheme.offload else 0.0)
        fp32 = float(self.software.master_bytes)
        if self.deepspeed and (scheme.stage or self.software.precision == "fp16"):
            at_once = min(own, self.job.buckets.sub_group) if scheme.stage == 3 else own
            low = high = (2.0 + fp32) * at_once  # flattened in 2 bytes, then in 4
            why = "gradients in fp32"
            if not self.software.fused_optimizer:
                high += 8.0 * at_once
                why += "; temporaries of torch's Adam if it is not fused"
        elif self.software.framework in ("fsdp", "fsdp2"):
            low, high, why = 0.0, 4.0 * own, "temporaries of torch's Adam if it is not fused"
        else:
            low, high, why = 0.0, 0.0, ""
        # DeepSpeed keeps stage 3's buckets; those of stages 1 and 2 are released.
        if scheme.stage == 3:
            free = free[:3]
        return Part(
            max(0.0, on_gpu * low - sum(part.low for part in free)),
            max(0.0, on_gpu * high - sum(part.high for part in free)),
            why,
        )

    # ---- off the GPU

    def off_gpu(self) -> tuple[dict[str, Part], float]:
        """Bytes of one host, pinned unless "pin_memory" is false, and of its NVMe."""
        scheme = self.scheme
        ranks = min(self.job.gpus, self.job.cluster.gpus_per_host)
        own = self.shard if scheme.stage else self.trained
        pages = "pinned" if scheme.pin_memory else "pageable"
        host, nvme = {}, 0.0
        if scheme.offload:
            states = optimizer_bytes(self.software) + self.software.master_bytes
            part = own * scheme.offload_ratio
            # Gradients in fp32, and in 16 bits (stage 3) or the new weights in 16 bits.
            gradients = 6.0
            if scheme.nvme_optimizer:
                nvme += ranks * part * (states + 4.0)
                group = min(part, self.job.buckets.sub_group)
                size = 4.0 * scheme.optimizer_buffers * group + 2.0 * part
                why = f"buffer_count x sub_group_size in fp32, gradients in 16 bits; {pages}"
            else:
                size, why = (states + gradients) * part, f"states, fp32 weights, gradients; {pages}"
                if scheme.stage < 3:
                    size += 2.0 * self._largest_matrix()
            host["optimizer"] = Part(ranks * size, ranks * size, why)
        if scheme.offload_param:
            part = 2.0 * self.job.all_experts_parameters / self.ranks
            if scheme.offload_param == "nvme":
                nvme += ranks * part
                size = 2.0 * (scheme.param_buffers + min(scheme.param_in_cpu, part / 2))
                why = f"buffer_count x buffer_size, max_in_cpu; {pages}"
            else:
                size, why = part, f"16 bits; {pages}"
            host["parameters"] = Part(ranks * size, ranks * size, why)
        if scheme.offload_activations and self.job.recomputation == "full":
            inputs = 2.0 * self.tokens * self.shape.hidden * self.job.stage_layers
            if scheme.partition_activations:
                inputs /= scheme.tensor
            host["activations"] = Part(ranks * inputs, ranks * inputs, "inputs of layers")
        return host, nvme


def optimizer_bytes(software: Software) -> float:
    """Bytes per parameter of an optimizer's states; of one that is not known, Adam's."""
    vectors = OPTIMIZERS.get(software.optimizer, 2)
    if software.optimizer == "sgd" and software.momentum:
        vectors = 1
    return float(vectors * software.state_bytes)


def layer_activation_bytes(
    shape: ModelShape,
    tokens: float,
    tensor: int = 1,
    sequence_parallel: bool = False,
    *,
    plain: bool = False,
    masks: bool = False,
    fp8: bool = False,
    adapters: int = 0,
    gathered_inputs: bool = False,
) -> float:
    """What one layer keeps for its backward pass, with FlashAttention.

    Fused kernels: the norms' inputs and outputs, q, k, v, the attention's output, 4 bytes per head
    for its softmax, inputs of the network's activation and of its last product. ``plain``, as
    transformers writes it: RMSNorm works in fp32 and keeps the copy and the normalized vector;
    SiLU's output besides. ``masks``: of dropout, 1 byte per
    element, in layers of GPT's kind: s b h (34) in all, equation 1 without 5 a s / h. ``fp8``:
    inputs of products are kept in 1 byte, but for the attention's. ``adapters``: LoRA's rank.
    ``gathered_inputs``: of divided products are kept whole (DTensor; Megatron gathers them again).
    """
    hidden, ffn, times = shape.hidden, shape.ffn, shape.top_k or 1
    whole = 8.0 * hidden
    if plain:
        whole += 8.0  # the norms' statistics
    if plain and shape.gated:
        whole += 8.0 * hidden  # 4 + 2 + 2 per norm in place of 2 + 2
    if masks and not shape.gated:
        whole += 2.0 * hidden
    divided = 2.0 * (2 * shape.q_width + 2 * shape.kv_width) + 4.0 * shape.heads
    if shape.qk_norm:
        divided += (6.0 if plain else 2.0) * (shape.q_width + shape.kv_width)
        divided += 4.0 * (shape.heads + shape.kv_heads) if plain else 0.0
    each = ((8.0 if plain else 6.0) if shape.gated else 4.0) * ffn
    divided += times * each
    if shape.experts:  # tokens sorted by expert, experts' outputs before their sum, the router's
        divided += times * 4.0 * hidden + 8.0 * shape.experts
        divided += each / ffn * shape.shared_ffn + (2.0 * hidden if shape.shared_ffn else 0.0)
    if fp8:
        whole -= 2.0 * hidden
        divided -= times * ffn
    if adapters:  # x of each adapter may be a copy with dropout, and its narrow product
        divided += 2.0 * (2 * hidden + shape.q_width + ffn) + 2.0 * 7 * adapters
    inputs = 4.0 * hidden * (1 - 1 / tensor) if gathered_inputs and sequence_parallel else 0.0
    return tokens * (whole / (tensor if sequence_parallel else 1) + divided / tensor + inputs)


def selected_bytes(shape: ModelShape, tokens: float, tensor: int = 1) -> float:
    """torchtitan's selective recomputation: the layer's input, the attention's output, and every
    second matrix product of wq, wk, wv, wo, w1, w3, w2, beginning with the first."""
    saved = 2 * shape.q_width + shape.kv_width + shape.hidden + shape.ffn
    return tokens * (2.0 * shape.hidden + 2.0 * saved + 4.0 * shape.heads) / tensor


def score_bytes(
    shape: ModelShape, micro_batch: int, tensor: int = 1, sequence_parts: int = 1
) -> float:
    """The matrices of scores of one layer: softmax's input and output in 2 bytes, a mask in 1."""
    return 5.0 * shape.heads * shape.sequence**2 * micro_batch / tensor / sequence_parts
