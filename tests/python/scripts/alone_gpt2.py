# One process that has the whole batch: the reference for smp_gpt2_sharded.py.
import torch
from task import batches, make_model

model = make_model()
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
    {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=2e-2, eps=1e-2)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
losses = []
data = batches(0, 1)
for step, tokens in enumerate(data):
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    losses.append(loss.item())
    if step % 2 == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
losses.append(model(input_ids=data[0], labels=data[0])["loss"].item())
