# One process that has the whole batch: what sagemaker_tp.py must give.
from task import batches, make_llama, make_optimizer

model = make_llama()
optimizer = make_optimizer(model.parameters())
losses = []
for tokens in batches(0, 1):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
