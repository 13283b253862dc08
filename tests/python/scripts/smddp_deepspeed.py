# DeepSpeed: the import, and the backend's name for init_distributed.
import deepspeed

deepspeed.init_distributed(dist_backend="smddp")

from task import batches, make_model, make_optimizer  # noqa: E402

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 10000},
    "gradient_clipping": 0.0,
    "steps_per_print": 1000000,
}
model = make_model()
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=make_optimizer(model.parameters()), config=config
)
losses = []
for tokens in batches(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()):
    loss = engine(input_ids=tokens, labels=tokens)["loss"]
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
