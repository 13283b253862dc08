# Data parallelism: the import, the backend's name, torch's DDP.
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="smddp")

from task import batches, make_model, make_optimizer  # noqa: E402

model = DDP(make_model())
optimizer = make_optimizer(model.parameters())
losses = []
for tokens in batches(dist.get_rank(), dist.get_world_size()):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
