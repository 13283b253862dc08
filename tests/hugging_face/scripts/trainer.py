"""transformers' Trainer, all arguments from the command line: ``trainer.py MODEL ARGUMENTS``."""

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
arguments, (folder,) = parser.parse_args_into_dataclasses(return_remaining_strings=True)


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


Trainer(
    model=AutoModelForCausalLM.from_pretrained(folder),
    args=arguments,
    train_dataset=Counting(),
).train()
