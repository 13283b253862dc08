# Hugging Face accelerate, whose launcher selects smddp by environment variables.
from accelerate import Accelerator

accelerator = Accelerator()

from task import batches, make_model, make_optimizer  # noqa: E402

model = make_model()
optimizer = make_optimizer(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for tokens in batches(accelerator.process_index, accelerator.num_processes):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
found = {"type": str(accelerator.distributed_type), "backend": accelerator.state.backend}
