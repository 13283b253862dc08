# Model parallelism v2: torch.sagemaker with torch's FSDP.
import functools
import os

import torch.distributed as dist

dist.init_process_group(backend="smddp")

import torch.sagemaker as tsm  # noqa: E402

# A path; without an argument only the launcher's parameters apply.
tsm.init(os.environ["SMP_CONFIG"])

from task import DEVICE, batches, make_model, make_optimizer  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402
from torch.distributed.fsdp import ShardingStrategy  # noqa: E402
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy  # noqa: E402
from torch.sagemaker import transform  # noqa: E402
from torch.sagemaker.grad_norm import clip_grad_norm_  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402

model = transform(make_model())
model = FSDP(
    model,
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block}
    ),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=DEVICE,
    use_orig_params=True,
)
optimizer = make_optimizer(model.parameters())
losses = []
for tokens in batches(tsm.state.rank, tsm.state.world_size):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    clip_grad_norm_(model, 1e9)
    optimizer.step()
    losses.append(loss.item())
found = {
    "strategy": model.sharding_strategy.name,
    "sharded_within": model.process_group.size(),
    "degree": tsm.state.hybrid_shard_degree,
    "initialized": tsm.is_initialized(),
}
