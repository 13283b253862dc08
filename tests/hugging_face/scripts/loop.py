"""A training loop with accelerate: ``loop.py MODEL RATE STEPS``; the launcher says how it runs."""

import os
import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

folder, rate, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
# Without GPUs, under DeepSpeed, accelerate itself counts one process.
rank = int(os.environ["RANK"])
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(steps):
    tokens = (torch.arange(16).view(1, 16) + step + rank) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print({"rank": rank, "loss": loss.item()}, flush=True)
accelerator.end_training()
