"""The shape of a decoder model, dense or with experts, and what follows from it.

A shape comes from the built-in list, from a transformers config, or from numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_smddp.planning import PlanError

# The sizes of a model that have no default.
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence")


@dataclass(frozen=True)
class ModelShape:
    """A decoder; sizes in elements, ``sequence`` in tokens.

    ``gated`` is a feed-forward network of three matrices (SwiGLU) instead of two. ``bias`` says
    which linear layers have one: "all", "qkv" or "none". ``positions`` is the number of learned
    positions, 0 if there are none. ``tied``: the output layer is the embedding. ``norm`` is the
    number of vectors of a norm: 1 (RMSNorm, or LayerNorm without bias) or 2 (LayerNorm).
    ``experts``: networks of ``ffn`` columns per layer, of which a token takes ``top_k``, besides
    one of ``shared_ffn`` columns that every token takes; 0: a dense model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    gated: bool = True
    bias: str = "none"
    positions: int = 0
    tied: bool = False
    norm: int = 1
    head_size: int = 0
    qk_norm: bool = False
    embedding_norm: bool = False
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for key in SIZES:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{key} of {self.name} is {value!r}; it is a whole number above 0")
        if self.heads % self.kv_heads:
            raise PlanError(
                f"{self.name} has {self.heads} heads and {self.kv_heads} kv heads; the first must "
                "be a multiple of the second"
            )
        if not self.head_size and self.hidden % self.heads:
            raise PlanError(
                f"{self.name} has a hidden size of {self.hidden}, which {self.heads} heads do not "
                "divide; give head_size"
            )

        if bool(self.experts) != bool(self.top_k) or self.top_k > self.experts:
            raise PlanError(
                f"{self.name} has {self.experts} experts of which a token takes {self.top_k}; give "
                "both, the second at most as large as the first"
            )

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def q_width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of all key heads, which is also that of all value heads."""
        return self.kv_heads * self.head_width

    @property
    def attention_matrices(self) -> int:
        """Elements of q, k, v and the output projection of one layer."""
        return self.hidden * (2 * self.q_width + 2 * self.kv_width)

    @property
    def expert_matrices(self) -> int:
        """Elements of one expert, or of the dense network, of one layer."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_ffn(self) -> int:
        """Columns of the networks that a token passes in one layer."""
        return self.ffn * (self.top_k or 1) + self.shared_ffn

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix of one layer."""
        return self.hidden * max(self.ffn, self.shared_ffn, self.q_width)

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer that a token meets: each is a GEMM."""
        network = (3 if self.gated else 2) * self.hidden * self.active_ffn
        return self.attention_matrices + network + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer with its biases, norms and all its experts."""
        unused = (self.experts - self.top_k) * self.expert_matrices
        return self.layer_matrices + unused + self.layer_vectors

    @property
    def layer_vectors(self) -> int:
        """Biases and norms of one layer."""
        biases = self.hidden if self.shared_ffn else 0  # the gate of Qwen's shared expert
        if self.bias in ("all", "qkv"):
            biases += self.q_width + 2 * self.kv_width
        if self.bias == "all":
            biases += self.hidden + (2 if self.gated else 1) * self.ffn + self.hidden
        norms = 2 * self.norm * self.hidden + (2 * self.head_width if self.qk_norm else 0)
        return biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers: embeddings, last norm, output layer."""
        outside = (self.vocabulary + self.positions) * self.hidden + self.norm * self.hidden
        if self.embedding_norm:
            outside += self.norm * self.hidden
        return outside + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters; a tied output layer counts once."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token does not pass."""
        return self.parameters - self.layers * (self.experts - self.top_k) * self.expert_matrices


def _sizes(*sizes: int, **more: Any) -> dict[str, Any]:
    """Sizes in the order of ``SIZES``, and what differs from Llama."""
    return dict(zip(SIZES, sizes, strict=True)) | more


def _gpt(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, **more: Any
) -> dict[str, Any]:
    """A decoder as GPT-2 and GPT-3: four times the hidden size in between, biases, LayerNorm."""
    more = {**_GPT, "positions": sequence, **more}
    return _sizes(layers, hidden, heads, heads, 4 * hidden, vocabulary, sequence, **more)


_GPT: dict[str, Any] = {"gated": False, "bias": "all", "norm": 2, "tied": True}
_NEOX: dict[str, Any] = {"tied": False, "positions": 0}
_MPT: dict[str, Any] = {"bias": "none", "norm": 1, "positions": 0}

# The built-in list: name -> arguments of ``ModelShape``, the sizes of the published configs.
# GPT-NeoX 65B and GPT-2 30B are the models of two AWS articles about the closed library; the first
# has no published shape, so it has that of Llama 65B with a feed-forward network of four times the
# hidden size.
BUILT_IN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _sizes(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _sizes(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _sizes(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _sizes(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _sizes(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": _sizes(126, 16384, 128, 8, 53248, 128256, 8192),
    "mixtral-8x7b": _sizes(32, 4096, 32, 8, 14336, 32000, 4096, experts=8, top_k=2),
    "mistral-7b": _sizes(32, 4096, 32, 8, 14336, 32000, 8192),
    "qwen2.5-7b": _sizes(28, 3584, 28, 4, 18944, 152064, 8192, bias="qkv"),
    "qwen2.5-32b": _sizes(64, 5120, 40, 8, 27648, 152064, 8192, bias="qkv"),
    "qwen2.5-72b": _sizes(80, 8192, 64, 8, 29568, 152064, 8192, bias="qkv"),
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt2-30b": _gpt(48, 7168, 64, 50257, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 51200, 2048),
    "mt-nlg-530b": _gpt(105, 20480, 128, 51200, 2048),
    "opt-13b": _gpt(40, 5120, 40, 50272, 2048, positions=2050),
    "opt-66b": _gpt(64, 9216, 72, 50272, 2048, positions=2050),
    "bloom-176b": _gpt(70, 14336, 112, 250880, 2048, positions=0, embedding_norm=True),
    "gpt-neox-20b": _gpt(44, 6144, 64, 50432, 2048, **_NEOX),
    "gpt-neox-65b": _gpt(80, 8192, 64, 50432, 2048, **_NEOX),
    "pythia-12b": _gpt(36, 5120, 40, 50688, 2048, **_NEOX),
    "mpt-7b": _gpt(32, 4096, 32, 50432, 2048, **_MPT),
    "mpt-30b": _gpt(48, 7168, 64, 50432, 8192, **_MPT),
}


def named(name: str) -> ModelShape:
    """A model of the built-in list.

    Raises:
        PlanError: the list has no such name.
    """
    key = name.strip().lower()
    if key not in BUILT_IN:
        raise PlanError(
            f"{name} is neither a file nor a model that smddp plan knows; it knows "
            f"{', '.join(BUILT_IN)}, and takes the config.json of others"
        )
    return ModelShape(key, **BUILT_IN[key])


def config_file(text: str) -> Path | None:
    """The transformers config that ``text`` names: its path, that of its folder, or a Hub name.

    Of a model of the Hub ("org/model") this one file is fetched, or taken from the cache.

    Raises:
        PlanError: ``text`` looks like a Hub name, and there is no such config.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return None
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(text, "config.json"))
    except ImportError:
        why = "huggingface_hub is not installed"
    except Exception as error:  # of the network, of access, of names: whatever the library raises
        why = str(error).strip().split("\n")[0]
    raise PlanError(
        f"{text} is no file, and the Hugging Face Hub gives no config.json of that name ({why}); "
        "give the path of one"
    )


def of_text(text: str) -> ModelShape:
    """A model by name, or by what :func:`config_file` takes.

    Raises:
        PlanError: there is neither, or the config is not one of a dense decoder.
    """
    path = config_file(text)
    if path is None:
        return named(text)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise PlanError(f"{path} is not the config of a model: it holds no JSON object")
    named_by = path if Path(text).exists() else Path(text) / "config.json"
    name = named_by.parent.name if named_by.name == "config.json" else named_by.stem
    return of_transformers(config, name or str(path))


# model_type -> what all its models have. Compared with transformers in tests/python/test_plan.py.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "mixtral": {},
    "qwen2_moe": {"bias": "qkv"},
    "qwen3_moe": {"qk_norm": True},
    "gpt2": _GPT,
    "gpt_neox": {**_GPT, "tied": False},
    "opt": _GPT,
    "bloom": {**_GPT, "embedding_norm": True},
    "mpt": {"gated": False, "tied": True},
}
# Names of one quantity in the configs of these families, in order of preference.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
# The same of models with experts, whose "intermediate_size" may be that of dense layers.
_EXPERT_KEYS = {
    "experts": ("num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn": ("shared_expert_intermediate_size",),
}


def of_transformers(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a transformers config describes.

    Raises:
        PlanError: the config is of a family that is not in the list, or lacks a size.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise PlanError(
            f"{name} has the model_type {family!r}; smddp plan reads configs of "
            f"{', '.join(_FAMILIES)}, and takes the sizes of other dense decoders as numbers"
        )
    sizes: dict[str, Any] = dict(_FAMILIES[family])
    keys = _KEYS | (_EXPERT_KEYS if _has_experts(config) else {})
    for key, names in keys.items():
        found = next((config[n] for n in names if config.get(n) is not None), None)
        if found is not None:
            sizes[key] = found
    if "heads" in sizes:
        sizes.setdefault("kv_heads", sizes["heads"])
    if "hidden" in sizes:
        sizes.setdefault("ffn", int(config.get("expansion_ratio", 4)) * sizes["hidden"])
    sizes.setdefault("sequence", 2048)
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise PlanError(f"{name} has layers with experts and layers without; smddp plan has not")
    missing = [key for key in _KEYS if key not in sizes]
    if missing:
        raise PlanError(f"the config of {name} has no {_KEYS[missing[0]][0]}")
    if "tie_word_embeddings" in config and family != "mpt":
        sizes["tied"] = bool(config["tie_word_embeddings"])
    if family == "llama" and config.get("attention_bias"):
        sizes["bias"] = "all" if config.get("mlp_bias") else "qkv"
    if family in ("gpt2", "opt"):
        sizes["positions"] = sizes["sequence"] + 2 * (family == "opt")
    if isinstance(config.get("head_dim"), int):
        sizes["head_size"] = config["head_dim"]
    return ModelShape(name, **sizes)


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(name) for name in _EXPERT_KEYS["experts"])
