"""A tiny Qwen2.5-VL with DeepSpeed: ``vision.py STEPS --deepspeed_config CONFIG``.

At each step one rank has an image. The others have a blank one, whose tokens are masked, as under
ZeRO-3 all ranks have to run all modules.
"""

import argparse

import deepspeed
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--local_rank", type=int)
arguments = deepspeed.add_config_arguments(parser).parse_args()

IMAGE, START, END, WORDS = 60, 61, 62, 56
small = {"hidden_size": 32, "intermediate_size": 64}
config = Qwen2_5_VLConfig(
    text_config={
        **small,
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    },
    vision_config={
        **small,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    },
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
torch.manual_seed(1)
model = Qwen2_5_VLForConditionalGeneration(config)
engine, *_ = deepspeed.initialize(arguments, model, model_parameters=model.parameters())
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
for step in range(arguments.steps):
    torch.manual_seed(rank)
    has_image = step % ranks == rank
    height = 8 if has_image else 4  # in patches of 14 by 14 pixels, four of which are a token
    pixels = torch.randn(height * 4, 3 * 2 * 14 * 14) if has_image else torch.zeros(16, 1176)
    picture = torch.tensor([START, *[IMAGE] * height, END])
    text = torch.randint(WORDS, (12,)).cumsum(0) % WORDS
    tokens = torch.cat([picture, text]).unsqueeze(0)
    loss = engine(
        input_ids=tokens,
        attention_mask=torch.cat([torch.full_like(picture, has_image), text * 0 + 1]).unsqueeze(0),
        labels=tokens.where(tokens < WORDS, -100),
        mm_token_type_ids=(tokens == IMAGE).int(),
        pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, height, 4]]),
    ).loss
    engine.backward(loss)
    engine.step()
    print({"rank": rank, "loss": loss.item()}, flush=True)
deepspeed.comm.destroy_process_group()
