# Model parallelism v1: GPT-2 with sharded data parallelism, checkpointing, a resumed run.
import os

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from torch import optim


@smp.step
def train_step(model, optimizer, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def groups_by_weight_decay(module):
    decayed = {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.01}
    others = {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0}
    return [decayed, others]


smp_config = {
    "ddp": True,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "microbatches": 2,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "fp16": False,
    "bf16": False,
    "offload_activations": False,
    "delayed_parameter_initialization": False,
    "optimize": "speed",
    "placement_strategy": "cluster",
    "activation_loading_horizon": 4,
    "skip_tracing": True,
    "auto_partition": True,
    "default_partition": 0,
    "static_mode": False,
    "fast_mode": False,
    "sharded_data_parallel_degree": 1,  # the launcher's value has precedence
}
smp.init(smp_config)

if smp.rank() == 0:
    print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")

from task import batches, make_model  # noqa: E402


def build():
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1, dtype=torch.get_default_dtype(), fused_softmax=True
    ):
        model = make_model()
    torch.cuda.set_device(smp.local_rank())
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=2)
    m = model.get_module()
    optimizer = optim.AdamW(groups_by_weight_decay(m), betas=(0.9, 0.95), lr=2e-2, eps=1e-2)
    for c in m.transformer.h.children():
        smp.set_activation_checkpointing(c)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, lr_scheduler


def train(model, optimizer, lr_scheduler, data):
    model.train()
    losses = []
    for step, input_ids in enumerate(data):
        boundary = step % 2 == 1
        if not boundary:
            optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, optimizer, input_ids, torch.ones_like(input_ids))
        losses.append(loss_mb.reduce_mean().item())
        if boundary:
            optimizer.step()
            lr_scheduler.step()
    return losses


data = list(batches(smp.dp_rank(), smp.dp_size()))
model, optimizer, lr_scheduler = build()
losses = train(model, optimizer, lr_scheduler, data[:4])

checkpoint_dir = os.environ["CHECKPOINT_DIR"]
for total_steps in (2, 3, 4):
    smp.save_checkpoint(
        checkpoint_dir,
        tag=f"total_steps{total_steps}",
        partial=True,
        model=model,
        optimizer=optimizer,
        user_content={"total_steps": total_steps, "lr_scheduler": lr_scheduler.state_dict()},
        num_kept_partial_checkpoints=2,
    )
smp.save_checkpoint(checkpoint_dir, tag="fullmodel.pt", partial=False, model=model)
straight = train(model, optimizer, lr_scheduler, data[4:])

model, optimizer, lr_scheduler = build()
user_content = smp.resume_from_checkpoint(checkpoint_dir, tag=None, partial=True)
lr_scheduler.load_state_dict(user_content["lr_scheduler"])
losses += train(model, optimizer, lr_scheduler, data[user_content["total_steps"] :])
assert losses[4:] == straight, (losses, straight)

model.eval()
with torch.no_grad():
    loss = test_step(model, data[0], torch.ones_like(data[0])).reduce_mean()
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
losses.append(loss.item() / smp.dp_size())
smp.barrier()
