"""Shared by the scripts: tiny models, their optimizer and their data."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

DEVICE = torch.device("cpu")
STEPS, BATCH, LENGTH, WORDS = 6, 8, 16, 64


def make_model():
    torch.manual_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_llama():
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_optimizer(parameters):
    # A large epsilon: with a small one, Adam amplifies gradients that are only rounding errors.
    return torch.optim.AdamW(parameters, lr=2e-2, weight_decay=0.0, eps=1e-2)


def train_alone(model):
    """The losses of one process that has the whole batch."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for tokens in batches(0, 1):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(rank, ranks):
    """Each step's part of one batch: int64 [BATCH / ranks, LENGTH]."""
    parts = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        first = torch.randint(0, WORDS, (BATCH, 1), generator=random)
        parts.append(((first + 5 * torch.arange(LENGTH)) % WORDS)[rank::ranks])
    return parts
