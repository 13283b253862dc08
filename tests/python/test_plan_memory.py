"""The planner's shapes and memory against transformers and the papers' own figures."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from deepspeed_smddp.planning import PlanError, hardware, model_shape
from deepspeed_smddp.planning.memory_use import (
    fits,
    layer_activation_bytes,
    memory_use,
    score_bytes,
)
from deepspeed_smddp.planning.training_job import Job, Scheme, Software
from harness import modules

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
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_parameters_are_those_of_the_model_that_transformers_makes(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    shape = model_shape.of_text(str(tmp_path))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("llama-3-405b", 405.85),
        ("gpt2-xl", 1.5576),
        ("gpt-neox-20b", 20.55),
        ("mpt-7b", 6.649),
        ("bloom-176b", 176.25),
    ],
)
def test_the_built_in_models_have_their_published_sizes(name, billions):
    assert model_shape.named(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_those_of_table_1_of_the_zero_paper(stage, gigabytes):
    # 7.5 billion parameters on 64 GPUs: the vocabulary is whatever the layers leave.
    shape = replace(model_shape.named("gpt2-xl"), hidden=4096, ffn=16384, heads=32, kv_heads=32)
    shape = replace(shape, layers=36, positions=0)
    left = 7.5e9 - 36 * shape.layer_parameters - 2 * 4096
    whole = replace(shape, vocabulary=round(left / 4096))
    assert whole.parameters / 1e9 == pytest.approx(7.5, rel=1e-6)
    job = Job(whole, hardware.cluster("p4d"), 64, Scheme(stage=stage))
    assert memory_use(job).states / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_activations_are_those_of_korthikanti_s_formulas():
    # Section 4 of the paper, GPT-3: s 2048, b 1, h 12288, a 96, t 8.
    shape = model_shape.named("gpt3-175b")
    sbh = 2048 * 12288
    scores = 5 * 96 * 2048 / 12288
    assert layer_activation_bytes(shape, 1) == 34 * sbh
    assert score_bytes(shape, 1) == pytest.approx(scores * sbh)
    assert layer_activation_bytes(shape, 1, tensor=8) == (10 + 24 / 8) * sbh
    assert layer_activation_bytes(shape, 1, 8, sequence_parallel=True) == 34 / 8 * sbh


def test_recomputation_and_flash_attention_take_memory_away():
    shape = model_shape.named("gpt2-xl")
    job = Job(shape, hardware.cluster("p4d"), 8, micro_batch=4, recomputation="none")
    plain = job.having(flash=False)
    least = [
        memory_use(plain).activations,
        memory_use(plain.having(recomputation="selective")).activations,
        memory_use(plain.having(recomputation="full")).activations,
    ]
    assert least == sorted(least, reverse=True)
    assert least[0] > 2 * memory_use(job).activations
    assert memory_use(job.having(recomputation="full")).activations < least[1]


def test_llama_2_70b_does_not_fit_one_host_but_a_sharded_one_fits_64():
    job = Job(model_shape.named("llama-2-70b"), hardware.cluster("p4d"), 8)
    assert not fits(job)
    assert fits(job.having(gpus=512))
    assert not fits(job.having(gpus=512, stage=2))


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (
            lambda: model_shape.of_transformers({"model_type": "mixtral"}, "x"),
            "model_type 'mixtral'",
        ),
        (lambda: model_shape.of_transformers({"model_type": "llama"}, "x"), "no num_hidden_layers"),
        (lambda: _llama(micro_batch=0), "micro_batch is 0"),
        (lambda: _llama(tensor=3), "can't be divided"),
        (lambda: _llama(degree=5), "does not divide the 16"),
    ],
)
def test_bad_input_is_one_sentence(call, part):
    with pytest.raises(PlanError, match=part) as caught:
        call()
    assert "\n" not in str(caught.value)


def _llama(**changes):
    job = Job(model_shape.named("llama-2-7b"), hardware.cluster("p4d"), 16, software=Software())
    return job.having(**changes)


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
    for case, path in measured.items():
        assert case.planned().total == pytest.approx(command.peak(path), rel=0.1), case
        run = json.loads(path.read_text())["case"]
        assert run["ds_config"] == case.ds_config()
        assert run["model"] == case.transformers_config()
    page = (command.RESULTS / "README.md").read_text()
    assert command.table(command.RESULTS) in page


def test_what_deepspeed_holds_besides():
    job = Job(model_shape.named("llama-2-7b"), hardware.cluster("p4de"), 16, micro_batch=1)
    use = memory_use(job)
    # A reduce bucket is allocated whole; the other 2 bytes are of the prefetch bucket.
    assert use.buckets == 2.0 * (job.buckets.reduce + job.buckets.prefetch)
    # Few ranks: 6 bytes of a shard's gradients are more than what the passes gather and keep.
    few = memory_use(job.having(gpus=1))
    own = job.shape.parameters
    passes = few.gathered + 2.0 * job.buckets.prefetch + few.activations + few.logits
    assert few.step_gradients == pytest.approx(max(0.0, 6 * min(own, 1e9) - passes))
    assert few.step_gradients > use.step_gradients
    cpu = memory_use(job, on_cpu=True)
    assert cpu.buckets - use.buckets == 2.0 * job.buckets.reduce
    assert cpu.fragmentation == cpu.context == 0
