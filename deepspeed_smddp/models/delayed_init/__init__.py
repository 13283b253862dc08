"""Delayed parameter initialisation: build a model without memory, fill in its values later.

    model = delayed_init(lambda: LlamaForCausalLM(config), seed=0)  # on the meta device
    fully_shard(model)
    materialize(model)

While the model is built, every operation on its tensors is recorded. ``materialize`` replays the
operations in order on the CPU, with the random numbers that they would have drawn. As soon as the
final value of a parameter is known, it is passed to the parameter's shards and freed, so that a
rank holds one whole parameter at a time besides its shards. The values are those of ordinary
construction on the CPU with the same seed, to the bit, however the model is sharded. The idea is
that of torchdistX's ``deferred_init``.
"""

from deepspeed_smddp.models.delayed_init.delayed_model import delayed_init, is_delayed, materialize

__all__ = ["delayed_init", "is_delayed", "materialize"]
