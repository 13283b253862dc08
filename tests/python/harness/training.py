"""Trains a tiny GPT-NeoX with DeepSpeed ZeRO-3; jobs whose ranks have DeepSpeed and transformers.

All jobs of a test process share one server (``harness.server``).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from typing import Any

from harness import layout as layouts
from harness import model_jobs, ports, server

# After torch, DeepSpeed and models: what deepspeed.initialize imports and loads besides. These are
# the builders of its operations (which run the C compiler), torch's compiler, by the way of an
# optimizer that no test uses, and the shared-memory operation, which is compiled once and then
# cached.
IMPORTS = """
import contextlib
import torch, torch.distributed, transformers
torch.set_num_threads(1)
import deepspeed
from transformers import GPT2LMHeadModel, GPTNeoXForCausalLM
import harness.sharding_jobs, harness.training, harness.world, harness.zero
from deepspeed.accelerator import get_accelerator
with contextlib.suppress(Exception):
    import deepspeed.ops.op_builder.all_ops
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.superoffload.superoffload_stage3
    import torch._subclasses.schema_check_mode
    import deepspeed.runtime.zero.muon.muon_optimizer
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
"""

STEPS = 4


def config(backend: str, precision: str) -> dict[str, Any]:
    """A DeepSpeed config; the one key that users write chooses smddp."""
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 2e-3, "eps": 1e-6}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 30_000,
            "stage3_prefetch_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 200,
            "stage3_max_live_parameters": 100_000,
        },
        "steps_per_print": 1_000_000,
    }
    if precision == "bf16":
        chosen["bf16"] = {"enabled": True}
    if backend == "smddp":
        chosen["comm_backend"] = "smddp"
    return chosen


def train(backend: str, precision: str) -> list[float]:
    """The mean losses of all ranks, one per step."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.manual_seed(3)
    model = model_jobs.gpt_neox()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(backend, precision)
    )
    assert dist.get_backend() == backend, dist.get_backend()
    losses = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 33), generator=random)
        tokens[:, 1::2] = tokens[:, :-1:2] + 1  # a pattern to learn
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    engine.destroy()
    return losses


def state_of(engine: Any) -> str:
    """A digest of all parameters of a ZeRO-3 engine."""
    import deepspeed

    state = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            state.update(parameter.detach().float().numpy().tobytes())
    return state.hexdigest()


def rank_main(job: dict[str, Any], rank: int, port: int) -> Any:
    """Calls the job's function with the job."""
    import torch

    from harness.world import rank_environment

    os.environ.update(rank_environment(job["layout"], rank, port))
    os.environ["LOCAL_RANK"] = str(layouts.local_rank(job["layout"], rank))
    os.environ.update(job.get("env", {}))
    torch.set_num_threads(1)
    module, _, function = job["call"].partition(":")
    return getattr(importlib.import_module(module), function)(job)


class Trainer:
    """Jobs whose ranks are forked from the server that has imported DeepSpeed and transformers."""

    @property
    def _server(self) -> server.Server:
        return server.with_imports(IMPORTS)

    def call(
        self, function: str, layout: str, backend: str, limit: float = 120, **given: Any
    ) -> list[dict[str, Any]]:
        """The result of ``function`` ("module:name") on each rank; it is called with the job.

        ``env`` of what is given: variables for the ranks.
        """
        results = self.attempt(function, layout, backend, limit, **given)
        errors = [result["error"] for result in results if "error" in result]
        assert not errors, "\n".join([*errors, self._server.log()])
        return results

    def attempt(
        self, function: str, layout: str, backend: str, limit: float = 120, **given: Any
    ) -> list[dict[str, Any]]:
        """Like :meth:`call`, but ranks may fail: their "error" is "died", "late" or a traceback."""
        results: list[dict[str, Any]] = self._server.ask(
            {
                "call": function,
                "layout": layout,
                "backend": backend,
                "limit": limit,
                **given,
                "main": "harness.training:rank_main",
                "size": len(layout),
                "port": ports.free_port(),
            }
        )
        return results
