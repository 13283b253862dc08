"""Trains tiny models with the features of ZeRO, one engine after another in one process.

Runs in the ranks that harness.training forks. ``run`` takes a job with ``cases``, names of the
functions below, and returns of each the losses, or DeepSpeed's error, the collectives that smddp
carried out and those that it forwarded, and the package's sentences.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from harness import model_jobs, training

STEPS = 3
WIDTH = 24
Case = Callable[[str], list[float]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run(job: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    import deepspeed_smddp
    from deepspeed_smddp.errors import logger

    backend = job["backend"]
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    assert dist.get_backend() == backend
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    answers: dict[str, Any] = {}
    for name in job["cases"]:
        said.clear()
        if backend == "smddp":
            deepspeed_smddp.reset_statistics()
        try:
            answers[name] = {"losses": CASES[name](backend)}
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        rows = deepspeed_smddp.statistics() if backend == "smddp" else []
        for kind, theirs in (("carried", False), ("forwarded", True)):
            answers[name][kind] = sorted(
                row["collective"]
                for row in rows
                if row["bytes"] and row["path"].startswith("fallback") == theirs
            )
        answers[name]["said"] = list(said)
        # If one rank fails, all fail: a rank that continued alone would wait for the others.
        failed = torch.tensor([float("error" in answers[name])])
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed and "error" not in answers[name]:
            answers[name] = {"error": "another rank failed"}
    dist.destroy_process_group()
    return {"answers": answers}


# --- the models ------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.second = torch.nn.Linear(3 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def blocks(count: int = 3) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(*[Block() for _ in range(count)])


def config(backend: str, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "comm_backend": backend,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "eps": 1e-6}},
        "zero_optimization": {
            "reduce_bucket_size": 2_000,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": 2_000,
            "stage3_param_persistence_threshold": 30,
            "stage3_max_live_parameters": 5_000,
            "stage3_max_reuse_distance": 2_000,
            **zero,
        },
        "steps_per_print": 1_000_000,
        **more,
    }


def batch(rank: int, like: torch.nn.Module) -> torch.Tensor:
    """The same batch at every step, so that the model learns it; in the parameters' type."""
    random = torch.Generator().manual_seed(11 + rank)
    return torch.randn(8, WIDTH, generator=random).to(next(like.parameters()).dtype)


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextlib.contextmanager
def engine_of(model: torch.nn.Module, settings: dict[str, Any], **more: Any) -> Iterator[Any]:
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    more.setdefault("model_parameters", parameters)
    engine, *_ = deepspeed.initialize(model=model, config=settings, **more)
    try:
        yield engine
    finally:
        engine.destroy()


def forward_and_step(engine: Any, place: int) -> float:
    """One micro-step on the batch of ``place``; the loss is the mean over all ranks."""
    x = batch(place, engine.module)
    loss = (engine(x) - x.roll(1, dims=1)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return mean(loss)


def fit(engine: Any, place: int | None = None) -> list[float]:
    place = dist.get_rank() if place is None else place
    steps = STEPS * engine.gradient_accumulation_steps()
    return [forward_and_step(engine, place) for _ in range(steps)]


def train(backend: str, zero: dict[str, Any], **more: Any) -> list[float]:
    with engine_of(blocks(), config(backend, zero, **more)) as engine:
        return fit(engine)


# --- the features ---------------------------------------------------------------------------------


@case
def stage_1(backend: str) -> list[float]:
    return train(backend, {"stage": 1})


@case
def stage_1_round_robin_bf16(backend: str) -> list[float]:
    zero = {"stage": 1, "round_robin_gradients": True}
    return train(backend, zero, bf16={"enabled": True})


@case
def stage_2(backend: str) -> list[float]:
    return train(backend, {"stage": 2, "contiguous_gradients": True})


@case
def stage_3(backend: str) -> list[float]:
    return train(backend, {"stage": 3})


@case
def gpt_neox(backend: str) -> list[float]:
    return training.train(backend, "fp32")


@case
def gpt_neox_bf16(backend: str) -> list[float]:
    return training.train(backend, "bf16")


@case
def accumulation(backend: str) -> list[float]:
    losses = []
    for stage in (1, 2, 3):
        losses += train(backend, {"stage": stage}, gradient_accumulation_steps=3)
    return losses


@case
def hpz(backend: str) -> list[float]:
    return train(backend, {"stage": 3, "zero_hpz_partition_size": 2}, bf16={"enabled": True})


@case
def qgz(backend: str) -> list[float]:
    return train(backend, {"stage": 3, "zero_quantized_gradients": True}, bf16={"enabled": True})


@case
def offload_to_cpu(backend: str) -> list[float]:
    place = {"device": "cpu", "pin_memory": False}
    losses = []
    for zero in (
        {"stage": 2, "offload_optimizer": place},
        {"stage": 3, "offload_optimizer": place},
        {"stage": 3, "offload_optimizer": place, "offload_param": place},
    ):
        losses += train(backend, zero, zero_force_ds_cpu_optimizer=False)
    return losses


@case
def leaf_modules(backend: str) -> list[float]:
    import deepspeed

    # Not the first module: DeepSpeed 0.19.8 fails (over gloo too) if a leaf's input needs no
    # gradient.
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), *blocks())
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    with engine_of(model, config(backend, {"stage": 3})) as engine:
        return fit(engine)


@case
def several_engines(backend: str) -> list[float]:
    """Three engines at once, of different stages, that step in turn."""
    losses = []
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(engine_of(blocks(count), config(backend, {"stage": stage})))
            for stage, count in ((3, 2), (2, 3), (3, 3))
        ]
        for _ in range(STEPS):
            losses += [forward_and_step(engine, dist.get_rank()) for engine in engines]
    return losses


@case
def compiled(backend: str) -> list[float]:
    """torch.compile of the model, by DeepSpeed's own call; graphs are traced, not generated."""
    losses = []
    for stage in (2, 3):
        with engine_of(blocks(), config(backend, {"stage": stage})) as engine:
            engine.compile(backend="aot_eager")
            losses += fit(engine)
    torch._dynamo.reset()
    return losses


@case
def moe(backend: str) -> list[float]:
    """Two experts, one per rank; all_to_all moves their tokens."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = Block()
            self.experts = MoE(
                WIDTH,
                torch.nn.Linear(WIDTH, WIDTH),
                num_experts=2,
                ep_size=2,
                k=1,
                min_capacity=4,
                use_rts=False,
            )
            self.after = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed, *_ = self.experts(self.before(x))
            return self.after(mixed)

    torch.manual_seed(5)
    model = Mixture()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
    settings = config(backend, {"stage": 2, "overlap_comm": False}, bf16={"enabled": True})
    del settings["optimizer"]
    torch.manual_seed(7)
    with engine_of(model, settings, optimizer=optimizer, model_parameters=groups) as engine:
        return fit(engine)


class Attention(torch.nn.Module):
    """Ulysses: every rank has a part of the sequence, and of the heads while attention runs."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.projection = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(self.local, group, scatter_idx=2, gather_idx=1)

    @staticmethod
    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # batch, heads, tokens, dimension
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x has this rank's tokens of one sequence.
        q, k, v = self.projection(x).view(1, len(x), 3, 4, WIDTH // 4).unbind(2)
        mixed = self.attention(q.contiguous(), k.contiguous(), v.contiguous(), 0)
        return x + mixed.reshape(len(x), WIDTH)


@case
def ulysses(backend: str) -> list[float]:
    torch.manual_seed(5)
    group = dist.new_group(list(range(dist.get_world_size())))
    model = torch.nn.Sequential(Attention(group), Block(), Attention(group))
    with engine_of(model, config(backend, {"stage": 3})) as engine:
        return fit(engine)


@case
def autotp(backend: str) -> list[float]:
    """Tensor parallelism over all ranks, so that all have the same batch."""
    losses = []
    for stage in (0, 1, 2):
        torch.manual_seed(5)
        model = model_jobs.llama()
        parallel = {"autotp_size": dist.get_world_size()}
        settings = config(backend, {"stage": stage}, tensor_parallel=parallel)
        with engine_of(model, settings) as engine:
            tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
            for _ in range(STEPS):
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                losses.append(mean(loss))
    return losses


@case
def model_parallel(backend: str) -> list[float]:
    """The groups of Megatron-DeepSpeed and GPT-NeoX, two ranks per model, in DeepSpeed's mpu."""
    import deepspeed

    size, rank = dist.get_world_size(), dist.get_rank()
    groups: dict[str, Any] = {}
    for first in (0, 1):
        ranks = list(range(first, size, 2))
        for name, kind in (("data", backend), ("data_gloo", "gloo")):
            made = dist.new_group(ranks, backend=kind)
            if rank in ranks:
                groups[name] = made
    for first in range(0, size, 2):
        made = dist.new_group([first, first + 1])
        if rank in (first, first + 1):
            groups["model"] = made
    data, model = groups["data"], groups["model"]
    # Shards go to the first rank over the Gloo group, the model group's first rank has the data.
    shards = [torch.empty(1) for _ in range(size // 2)] if dist.get_rank(data) == 0 else None
    dist.gather(torch.tensor([float(rank)]), shards, group_dst=0, group=groups["data_gloo"])
    assert shards is None or [s.item() for s in shards] == list(range(rank, size, 2))
    source = torch.tensor([rank])
    dist.broadcast(source, group_src=0, group=model)
    assert source.item() == rank // 2 * 2
    place = dist.get_rank(data)
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_world_size=lambda: size // 2,
        get_data_parallel_rank=lambda: place,
        get_model_parallel_group=lambda: model,
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_rank=lambda: rank % 2,
    )
    losses = []
    with engine_of(blocks(), config(backend, {"stage": 1}), mpu=mpu) as engine:
        losses += fit(engine, place)
    settings = config(backend, {"stage": 3})
    with deepspeed.zero.Init(data_parallel_group=data, config_dict_or_path=settings, mpu=mpu):
        sharded = blocks()
    with engine_of(sharded, settings, mpu=mpu) as engine:
        losses += fit(engine, place)
    return losses


def muon(backend: str, stage: int) -> list[float]:
    section = {"stage": stage, "reduce_scatter": False}
    optimizer = {"type": "Muon", "params": {"lr": 1e-2}}
    return train(backend, section, optimizer=optimizer, bf16={"enabled": True})


@case
def muon_2(backend: str) -> list[float]:
    return muon(backend, 2)


@case
def muon_3(backend: str) -> list[float]:
    return muon(backend, 3)


@case
def inference(backend: str) -> list[float]:
    """No optimizer: parameters are gathered for each forward pass, and for each token generated."""
    import deepspeed

    torch.manual_seed(5)
    section = {"stage": 3, "stage3_param_persistence_threshold": 30}
    settings = {k: v for k, v in config(backend, section).items() if k != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model_jobs.llama(), config=settings)
    engine.module.eval()
    rank = dist.get_rank()
    tokens = torch.arange(6).view(1, 6) + rank
    with torch.no_grad():
        scores = engine(input_ids=tokens).logits.double().sum()
        # Ranks end at different lengths; with synced_gpus all take part until the last one ends.
        text = engine.module.generate(
            tokens,
            max_new_tokens=4 + 3 * rank,
            do_sample=False,
            synced_gpus=True,
            use_cache=True,
            pad_token_id=0,
        )
    engine.destroy()
    return [mean(part) for part in (scores, text.double().sum(), torch.tensor(text.shape[1]))]


@case
def save_16bit(backend: str) -> list[float]:
    """The whole model in one file, gathered by ``stage3_gather_16bit_weights_on_model_save``."""
    section = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    with engine_of(blocks(), config(backend, section, bf16={"enabled": True})) as engine:
        losses = fit(engine)
        folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        assert engine.save_16bit_model(folders[0])
        dist.barrier()
        saved = torch.load(Path(folders[0], "pytorch_model.bin"))
    whole = blocks().state_dict()
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in whole.items()}
    return [*losses, float(sum(t.double().abs().sum() for t in saved.values()))]
