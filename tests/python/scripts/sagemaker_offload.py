# Model parallelism v2: activation offloading around a checkpointed model.
import torch.sagemaker as tsm

tsm.init()

from task import DEVICE, batches, make_model, make_optimizer  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    apply_activation_checkpointing,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402

model = FSDP(make_model(), device_id=DEVICE, use_orig_params=True)
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GPT2Block))
model = offload_wrapper(model)
optimizer = make_optimizer(model.parameters())
losses = []
for tokens in batches(tsm.state.rank, tsm.state.world_size):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
