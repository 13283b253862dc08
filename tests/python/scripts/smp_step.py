# Model parallelism v1: smp.init, smp.step, DistributedModel, DistributedOptimizer.
import smdistributed.modelparallel.torch as smp
import torch


@smp.step
def train_step(model, tokens):
    output = model(input_ids=tokens, labels=tokens)
    loss = output["loss"]
    model.backward(loss)
    return output["logits"], loss


def train(model, device, train_loader, optimizer):
    model.train()
    losses = []
    for tokens in train_loader:
        tokens = tokens.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(model, tokens)
        loss = loss_mb.reduce_mean()
        optimizer.step()
        losses.append(loss.item())
    return losses


smp.init()

torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda")

from task import batches, make_model, make_optimizer  # noqa: E402

train_loader = batches(smp.dp_rank(), smp.dp_size())
model = make_model()
optimizer = make_optimizer(model.parameters())

model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)

losses = train(model, device, train_loader, optimizer)
