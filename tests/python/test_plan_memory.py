"""The planner's shapes and memory against transformers and the papers' own figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from deepspeed_smddp.config.parsing import nested
from deepspeed_smddp.planning import (
    PlanError,
    config_keys,
    hardware,
    model_shape,
    real_activations,
)
from deepspeed_smddp.planning.memory_use import (
    MemoryUse,
    Part,
    layer_activation_bytes,
    memory_use,
    score_bytes,
    selected_bytes,
)
from deepspeed_smddp.planning.recommendation import ds_config
from deepspeed_smddp.planning.training_job import Job, Scheme, of_config
from harness import modules

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

N = 6738415616  # parameters of Llama 2 7B
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 211}
CONFIGS = [
    transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=176),
    transformers.LlamaConfig(**SMALL, intermediate_size=176, attention_bias=True, mlp_bias=True),
    transformers.LlamaConfig(**SMALL, intermediate_size=176, tie_word_embeddings=True),
    transformers.MistralConfig(**SMALL, num_key_value_heads=1, intermediate_size=176, head_dim=8),
    transformers.Qwen2Config(**SMALL, num_key_value_heads=2, intermediate_size=96),
    transformers.Qwen3Config(**SMALL, num_key_value_heads=2, intermediate_size=96, head_dim=32),
    transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=211),
    transformers.GPTNeoXConfig(**SMALL, intermediate_size=256),
    transformers.OPTConfig(
        **SMALL, ffn_dim=200, word_embed_proj_dim=64, max_position_embeddings=128
    ),
    transformers.BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=211),
    transformers.MptConfig(d_model=64, n_layers=3, n_heads=4, vocab_size=211),
    transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=96, num_local_experts=4
    ),
    transformers.Qwen2MoeConfig(
        **SMALL, **EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=80
    ),
    transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, num_key_value_heads=2, head_dim=16),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_parameters_are_those_of_the_model_that_transformers_makes(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    shape = model_shape.of_text(str(tmp_path))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_name_of_the_hub_is_its_config(tmp_path, monkeypatch):
    folder = tmp_path / "models--some--model-1"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps(CONFIGS[0].to_dict()))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0].to_dict()))
    there, here = model_shape.of_text("some/model-1"), model_shape.of_text(str(tmp_path))
    assert there.name == "model-1"
    assert replace(there, name=here.name) == here
    assert real_activations.of_text("some/model-1", 64) > 0
    with pytest.raises(
        PlanError, match=r"some/other is no file, and the Hugging Face Hub gives no"
    ):
        model_shape.of_text("some/other")


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_table_1_of_the_zero_paper(stage, gigabytes):
    # 7.5 billion parameters on 64 GPUs: the vocabulary is whatever the layers leave.
    shape = replace(model_shape.named("gpt2-xl"), hidden=4096, ffn=16384, heads=32, kv_heads=32)
    shape = replace(shape, layers=36, positions=0)
    left = 7.5e9 - 36 * shape.layer_parameters - 2 * 4096
    whole = replace(shape, vocabulary=round(left / 4096))
    assert whole.parameters / 1e9 == pytest.approx(7.5, rel=1e-6)
    job = Job(whole, hardware.cluster("p4d"), 64, Scheme(stage=stage))
    parts = memory_use(job).parts
    states = sum(parts[name].low for name in ("parameters", "gradients", "optimizer"))
    assert states / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_activations_are_those_of_korthikanti_s_formulas():
    # Section 4 of the paper, GPT-3: s 2048, b 1, h 12288, a 96, t 8. Besides: 4 bytes per head for
    # FlashAttention, which the paper's layer has not.
    shape = model_shape.named("gpt3-175b")
    sbh = 2048 * 12288
    statistics = 2048 * 4 * 96
    scores = 5 * 96 * 2048 / 12288
    assert layer_activation_bytes(shape, 2048, masks=True) == 34 * sbh + statistics
    assert score_bytes(shape, 1) == pytest.approx(scores * sbh)
    assert (
        layer_activation_bytes(shape, 2048, tensor=8, masks=True)
        == (10 + 24 / 8) * sbh + statistics / 8
    )
    assert (
        layer_activation_bytes(shape, 2048, 8, sequence_parallel=True, masks=True)
        == 34 / 8 * sbh + statistics / 8
    )


@pytest.mark.parametrize(
    ("name", "fused", "plain"),
    [
        # 8 h, 2 (2 q + 2 kv), 4 per head, 6 f; plain: 16 h and statistics of 8, 8 f.
        (
            "llama-3-8b",
            8 * 4096 + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 6 * 14336,
            16 * 4096 + 8 + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 8 * 14336,
        ),
        # Two matrices: 4 f, both with LayerNorm's own kernel.
        (
            "gpt-neox-20b",
            8 * 6144 + 8 * 6144 + 4 * 64 + 4 * 24576,
            8 * 6144 + 8 + 8 * 6144 + 4 * 64 + 4 * 24576,
        ),
        # Two experts of 14336 columns: their inputs and outputs, 4 h each; the router's 8 per
        # expert.
        (
            "mixtral-8x7b",
            8 * 4096 + 20480 + 128 + 2 * (6 * 14336 + 4 * 4096) + 8 * 8,
            16 * 4096 + 8 + 20480 + 128 + 2 * (8 * 14336 + 4 * 4096) + 8 * 8,
        ),
    ],
)
def test_a_layer_s_activations_by_hand(name, fused, plain):
    shape = model_shape.named(name)
    assert layer_activation_bytes(shape, 3) == 3 * fused
    assert layer_activation_bytes(shape, 3, plain=True) == 3 * plain


def test_megatron_s_states_by_hand():
    # docs/.../dist_optimizer.md: bf16 with gradients in fp32, 18, and 6 + 12 / d divided; at least
    # gradients in 16 bits, and remainders in 2 bytes in place of weights in 4.
    shape, cluster = model_shape.named("llama-2-7b"), hardware.cluster("p4de")
    names = ("parameters", "gradients", "optimizer")
    for stage, low, high in ((0, 2 + 2 + 12, 18), (1, 4 + 10 / 8, 6 + 12 / 8)):
        job = Job(shape, cluster, 8, Scheme(stage=stage)).having(framework="megatron")
        parts = [memory_use(job).parts[name] for name in names]
        assert sum(part.low for part in parts) == low * N
        assert sum(part.high for part in parts) == high * N


def test_torchtitan_s_selective_recomputation_by_hand():
    # Llama 3 8B: the input, wq, wv, the attention's output, w1 and w2 of 7 products.
    by_hand = 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32
    assert selected_bytes(model_shape.named("llama-3-8b"), 10) == 10 * by_hand


_COUNTED = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "mixtral", "qwen3_moe", "qwen2_moe")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_plain_layers_keep_what_autograd_keeps(config):
    """The others have an attention or an activation of their own: they are counted, not derived."""
    counted = real_activations.layer_bytes(config.to_dict(), 128)
    assert counted
    shape = model_shape.of_transformers(config.to_dict(), config.model_type)
    if config.model_type in _COUNTED:
        assert layer_activation_bytes(shape, 1, plain=True) == pytest.approx(counted, rel=0.03)


def test_a_config_s_real_layer_counts(tmp_path):
    config = transformers.OPTConfig(
        **SMALL, ffn_dim=200, word_embed_proj_dim=64, max_position_embeddings=128
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    counted = real_activations.of_text(str(tmp_path), 128)
    assert counted == real_activations.layer_bytes(config.to_dict(), 128)
    shape = replace(model_shape.of_text(str(tmp_path)), sequence=128)
    job = Job(shape, hardware.cluster("p4d"), 8, recomputation="none", counted_layer=counted)
    assert memory_use(job).parts["activations"].high == pytest.approx(3 * 128 * counted)
    assert real_activations.of_text("llama-2-7b", 128) == 0
    assert real_activations.layer_bytes({"model_type": "of nobody"}, 128) is None


def _memory_command():
    return modules.load("benchmarks/plan_memory.py")


def test_real_steps_on_cpus_need_what_the_planner_says_within_ten_percent():
    command = _memory_command()
    measured = {
        case: command.RESULTS / f"case-{number}.json"
        for number, case in enumerate(command.CASES, 1)
        if (command.RESULTS / f"case-{number}.json").exists()
    }
    assert len(measured) >= 3
    stages = {(case.stage, case.offload) for case in measured}
    assert stages >= {(1, ""), (2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "both")}
    assert len({case.model for case in measured}) >= 3
    for case, path in measured.items():
        low, high = case.planned()
        assert (low + high) / 2 == pytest.approx(command.peak(path), rel=0.1), case
        run = json.loads(path.read_text())["case"]
        assert run["ds_config"] == case.ds_config()
        assert run["model"] == case.transformers_config()


def test_of_published_runs_that_ran_at_most_three_percent_are_refused():
    command = modules.load("benchmarks/plan_refusals.py")
    ran = command.ran()
    assert len(ran) >= 230
    refused = [str(run) for run in ran if run.verdict == "does not fit"]
    assert len(refused) <= 0.03 * len(ran), refused


def test_published_peaks_are_within_the_range_or_little_above_it():
    peaks = list(modules.load("benchmarks/plan_refusals.py").peaks())
    assert len(peaks) == 11
    assert all(low < peak <= 1.17 * high for _, peak, low, high in peaks)
    assert sum(peak <= high for _, peak, _, high in peaks) >= 6


def test_of_reports_of_memory_that_ran_out_four_fifths_are_refused_or_at_the_edge():
    reports = list(modules.load("benchmarks/plan_refusals.py").ran_out())
    assert len(reports) >= 10
    fit = [str(report) for report in reports if report.verdict == "fits"]
    assert len(fit) <= 0.2 * len(reports), fit


def test_a_verdict_between_is_at_the_edge():
    use = MemoryUse({"a": Part(1.0, 2.0, ""), "b": Part(3.0, 5.0, "")}, {}, 0.0)
    assert (use.low, use.high) == (4.0, 7.0)
    verdicts = [use.verdict(capacity) for capacity in (3.9, 4.0, 6.9, 7.0)]
    assert verdicts == ["does not fit", "at the edge", "at the edge", "fits"]


# ---- keys of DeepSpeed's configs


def planned(**zero):
    """Llama 2 7B with ZeRO-3 on 8 GPUs, or with other values of "zero_optimization"."""
    return of(zero_optimization={"stage": 3, **zero})


def of(recomputation="full", **config):
    shape, cluster = model_shape.named("llama-2-7b"), hardware.cluster("p4de")
    return of_config(shape, cluster, 8, config, recomputation=recomputation)


def part(job, name):
    return memory_use(job).parts.get(name, Part(0.0, 0.0, ""))


def test_offloaded_optimizers_and_parameters_are_the_host_s():
    usual = memory_use(planned())
    assert usual.parts["optimizer"].low == 12 * N / 8
    for device in ("cpu", "nvme"):
        job = planned(offload_optimizer={"device": device}, offload_param={"device": device})
        use = memory_use(job)
        assert "optimizer" not in use.parts and "gradients" not in use.parts
        vectors = 2 * 32 * 2 * 4096
        assert use.parts["parameters"].low == vectors
        if device == "cpu":
            # Eight ranks: Adam's 8, weights in 4, gradients in 4 and 2; parameters in 2.
            assert use.host["optimizer"].low == 18 * N
            assert use.host["parameters"].low == 2 * N
            assert use.nvme == 0
        else:
            assert use.nvme == 16 * N + 2 * N
            # Four buffers of fp32 for a rank's shard, which is less than a sub-group.
            assert use.host["optimizer"].low == 4 * 4 * N + 2 * N
    half = planned(offload_optimizer={"device": "cpu", "ratio": 0.5})
    assert part(half, "optimizer").low == 6 * N / 8


def test_stages_1_and_2():
    one, two = (of(zero_optimization={"stage": stage}) for stage in (1, 2))
    assert part(one, "parameters").low == part(two, "parameters").low == 2 * N
    assert part(one, "gradients").low == 2 * N
    assert part(two, "gradients").low == 2 * N / 8
    assert part(two, "optimizer").low == 12 * N / 8
    assert part(two, "buckets").low == 2 * 500_000_000
    both = of(zero_optimization={"stage": 2, "overlap_comm": True})
    assert part(both, "buckets").low == 4 * 500_000_000


def test_mics_hpz_and_the_sharding_degree():
    within = planned(mics_shard_size=4)
    assert part(within, "optimizer").low == 12 * N / 4
    copies = planned(zero_hpz_partition_size=4)
    assert part(copies, "parameters").low - part(planned(), "parameters").low == 2 * N / 4
    assert part(copies, "optimizer").low == 12 * N / 8


def test_sequence_parallelism_divides_tokens_and_still_shards_over_all_ranks():
    job = of(zero_optimization={"stage": 3}, sequence_parallel_size=4)
    assert job.data_parallel == 2 and job.shard_ranks == 8
    assert part(job, "optimizer").low == 12 * N / 8
    micro = {"train_micro_batch_size_per_gpu": 1}
    whole = of(zero_optimization={"stage": 3}, **micro)
    quarter = of(zero_optimization={"stage": 3}, sequence_parallel_size=4, **micro)
    assert part(quarter, "activations").low == part(whole, "activations").low / 4


@pytest.mark.parametrize(
    ("name", "each"),
    [("AdamW", 12), ("Lion", 8), ("SGD", 4), ("Adagrad", 8), ("OneBitAdam", 16), ("auto", 12)],
)
def test_the_optimizer_s_kind(name, each):
    job = of(zero_optimization={"stage": 1}, optimizer={"type": name})
    assert part(job, "optimizer").low == each * N / 8


def test_states_and_weights_in_16_bits():
    more = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    job = of(zero_optimization={"stage": 1}, bf16={"enabled": True, **more})
    assert part(job, "optimizer").low == (2 + 2 * 2) * N / 8


def test_transformers_auto_values():
    job = planned(
        reduce_bucket_size="auto",
        stage3_prefetch_bucket_size="auto",
        stage3_param_persistence_threshold="auto",
    )
    assert job.buckets.reduce == 4096**2
    assert job.buckets.prefetch == int(0.9 * 4096**2)
    assert job.buckets.persistence == 40960


def test_lora_and_qlora():
    shape, cluster = model_shape.named("llama-2-7b"), hardware.cluster("rtx4090", 10)
    config = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1}
    shape = replace(shape, sequence=512)
    lora = of_config(shape, cluster, 1, config, lora_rank=16)
    adapters = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert lora.trained_parameters == adapters == 39976960  # PEFT's print_trainable_parameters
    assert part(lora, "parameters").low == 2 * N
    assert part(lora, "optimizer").low == 12 * adapters
    assert memory_use(lora).verdict(25.3e9) == "fits"
    qlora = of_config(shape, cluster, 1, config, lora_rank=16, base_bits=4)
    kept = 2 * 32000 * 4096 + (32 * 2 + 1) * 4096
    each = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert part(qlora, "parameters").low == pytest.approx((N - kept) * each + 2 * kept)
    full = of_config(shape, cluster, 1, config)
    assert memory_use(full).verdict(25.3e9) == "does not fit"
    with pytest.raises(PlanError, match="with LoRA 8 or 4"):
        of_config(shape, cluster, 1, config, base_bits=4)


def test_experts_and_expert_parallelism():
    shape = model_shape.named("mixtral-8x7b")
    assert shape.parameters == 46702792704
    config = {"zero_optimization": {"stage": 1}}
    cluster = hardware.cluster("p5en")
    job = of_config(shape, cluster, 8, config)
    divided = of_config(shape, cluster, 8, config | {"expert_parallel": {"autoep_size": 8}})
    experts = 32 * 8 * 3 * 4096 * 14336
    assert part(job, "parameters").low == 2 * shape.parameters
    assert part(divided, "parameters").low == 2 * (shape.parameters - experts * 7 / 8)
    assert part(divided, "optimizer").low == part(job, "optimizer").low == 12 * shape.parameters / 8


def test_fp8_and_flash_and_recomputation():
    shape, cluster = model_shape.named("llama-3-8b"), hardware.cluster("p5")
    job = Job(shape, cluster, 8, recomputation="none")
    tokens = 8192 * 32
    low = part(job, "activations").low
    in_fp8 = part(job.having(precision="fp8"), "activations")
    # The norms' outputs and the network's last input in 1 byte.
    assert low - in_fp8.low == tokens * (2 * 4096 + 14336)
    assert in_fp8.high == part(job, "activations").high
    scores = 32 * 5 * 32 * 8192**2
    assert part(job.having(flash=False), "activations").low - low == scores
    assert part(job.having(recomputation="full"), "activations").low == tokens * 2 * 4096


def _schema():
    """Every key of the installed DeepSpeed's configs."""
    from deepspeed.profiling import config as profiling
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime.activation_checkpointing import config as checkpointing
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config

    class Asked(dict):
        def get(self, key, default=None):
            keys.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            keys.add(key)
            return super().__contains__(key)

    keys = set()
    runtime.DeepSpeedConfig(Asked(train_batch_size=1))
    keys -= {"zero_optimization", "bf16", "bfloat16", "fp16", "data_types", "tensor_parallel"}
    keys |= {"activation_checkpointing." + key for key in checkpointing.ACT_CHKPT_DEFAULT}
    keys |= {"sequence_parallel_size", "tensor_parallel.autotp_size", "optimizer.type"}
    keys |= {f"data_types.{runtime.GRAD_ACCUM_DTYPE}", profiling.FLOPS_PROFILER}
    for section, model in (
        ("bf16", DeepSpeedBF16Config),
        ("bfloat16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
        ("zero_optimization", zero.DeepSpeedZeroConfig),
        ("zero_optimization.offload_param", offload_config.DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.offload_optimizer", offload_config.DeepSpeedZeroOffloadOptimizerConfig),
    ):
        for name, of_field in model.model_fields.items():
            keys.add(f"{section}.{of_field.alias or name}")
    return keys - {"zero_optimization.offload_param", "zero_optimization.offload_optimizer"}


def test_every_key_of_deepspeed_s_schema_is_in_one_table():
    pytest.importorskip("deepspeed")
    tables = (config_keys.MODELLED, config_keys.WITHOUT_EFFECT, config_keys.NOT_CONSIDERED)
    assert all(not a & b for a in tables for b in tables if a is not b)
    none = {key for key in _schema() if not any(key in table for table in tables)}
    assert not none


# Another value of each modelled key, and what it needs beside it.
_VALUES = {
    "comm_backend": "smddp",
    "smddp": {"sharded_data_parallel_degree": 4},
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 5,
    "sequence_parallel_size": 2,
    "pipe_parallel_size": 2,
    "data_types.grad_accum_dtype": "fp32",
    "optimizer.type": "Lion",
    "optimizer.params.momentum": 0.9,
    "tensor_parallel.autotp_size": 2,
    "expert_parallel.autoep_size": 2,
    "zero_optimization.stage": 2,
    "zero_optimization.overlap_comm": True,
    "zero_optimization.contiguous_gradients": False,
    "zero_optimization.mics_shard_size": 4,
    "zero_optimization.zero_hpz_partition_size": 4,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.ratio": 0.5,
}
_NUMBERS = ("size", "threshold", "parameters", "distance", "count", "max_in_cpu")
_BESIDE = {
    "zero_optimization.overlap_comm": {"zero_optimization.stage": 2},
    "optimizer.params.momentum": {"optimizer.type": "SGD"},
    "zero_optimization.offload_optimizer.buffer_count": {
        "zero_optimization.offload_optimizer.device": "nvme"
    },
    "zero_optimization.offload_optimizer.ratio": {
        "zero_optimization.offload_optimizer.device": "cpu"
    },
}


@pytest.mark.parametrize("key", sorted(config_keys.MODELLED))
def test_a_modelled_key_changes_the_plan(key):
    def config(values):
        return nested({"zero_optimization.stage": 3} | values)

    if key in _VALUES:
        value = _VALUES[key]
    elif key.endswith(".pin_memory"):
        value = False
    elif key.endswith(_NUMBERS):
        value = 7
    else:
        value = True
    if key in ("bf16.enabled", "bfloat16.enabled"):
        value = False
    beside = _BESIDE.get(key, {})
    shape, cluster = model_shape.named("mixtral-8x7b"), hardware.cluster("p5en")
    before = of_config(shape, cluster, 8, config(beside))
    after = of_config(shape, cluster, 8, config(beside | {key: value}))
    assert after != before
    # And what the planner writes of it says it again.
    # Settings of an offload that is off are not written.
    off = ("pin_memory", "param_buffers", "param_in_cpu", "optimizer_buffers")
    same = {name: getattr(Scheme, name) for name in off} if "offload" in key else {}
    written = of_config(shape, cluster, 8, ds_config(after))
    assert written.having(**same) == after.having(**same)


def test_keys_that_are_not_considered_are_named():
    config = {
        "steps_per_print": 10,
        "torch_autocast": {"enabled": True},
        "hybrid_engine": {"enabled": False},
        "zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}, "of_tomorrow": 1},
    }
    assert config_keys.not_considered(config) == [
        "torch_autocast.enabled",
        "zero_optimization.zenflow.topk_ratio",
        "zero_optimization.of_tomorrow",
    ]
