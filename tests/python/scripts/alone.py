# One process that has the whole batch: what all the others must give.
from task import batches, make_model, make_optimizer

model = make_model()
optimizer = make_optimizer(model.parameters())
losses = []
for tokens in batches(0, 1):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
