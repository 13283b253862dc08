# Model parallelism v2: tensor parallelism by transform, sharding by FSDP.
import torch.sagemaker as tsm

tsm.init()

from task import DEVICE, batches, make_llama, make_optimizer  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402

model = tsm.transform(make_llama())
model = FSDP(model, device_id=DEVICE, use_orig_params=True)
optimizer = make_optimizer(model.parameters())
dp_rank = tsm.state.rank // tsm.state.tp_size
dp_size = tsm.state.world_size // tsm.state.tp_size
losses = []
for tokens in batches(dp_rank, dp_size):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = {"tp_rank": tsm.state.tp_rank, "sharded_within": model.process_group.size()}
