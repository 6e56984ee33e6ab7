"""Makes the checkpoints of the GPU scenario: random bfloat16 weights in the shape of Qwen3, and a tokenizer.

Usage: make_models.py DIRECTORY

`base` and `other` have equal shapes (2.6 GiB) and different values, `spare` is `base` again, `large` has 12.9 GiB.
Random weights answer the same tokens every time at temperature 0, which is all that a golden needs. Needs torch and
safetensors, and a GPU to be fast.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "lab"))
import make_model

SHARD = 4 << 30
SMALL = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
MODELS = {"base": (SMALL, 1), "other": (SMALL, 2), "large": (LARGE, 3)}
SHARED = {"num_key_value_heads": 8, "head_dim": 128}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            made[f"model.layers.{layer}.{name}.weight"] = shape
    return {**made, "model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def tensor(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:  # norms
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.randn(shape, device=device) * 0.02
    if name == "lm_head.weight":
        # Only tokens that are text: neither the end nor a byte that is no letter.
        for row in (0, *(1 + byte for byte in range(256) if not 0x20 <= byte < 0x7F)):
            values[row] = 0.0
    return values.to(torch.bfloat16).cpu()


def make(directory: Path, sizes: dict, seed: int) -> None:
    config = {**make_model.CONFIG, **SHARED, **sizes}
    directory.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, shape in shapes(config).items():
        made = tensor(name, shape, device)
        size += made.nbytes
        if size > SHARD:
            shards.append({})
            size = made.nbytes
        shards[-1][name] = made
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # it makes files for their owner alone
        index |= dict.fromkeys(shard, file)
    total = sum(one.nbytes for shard in shards for one in shard.values())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": make_model.END,
        "pad_token": make_model.END,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": make_model.CHAT_TEMPLATE,
    }
    for name, content in {
        "config.json": config,
        "generation_config.json": {"do_sample": False},
        "tokenizer.json": make_model.tokenizer(),
        "tokenizer_config.json": settings,
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": index},
    }.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    print(f"{directory}: {total / 2**30:.2f} GiB in {len(shards)} file(s)", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    into = Path(sys.argv[1])
    for one, (sizes, seed) in MODELS.items():
        make(into / one, sizes, seed)
    shutil.copytree(into / "base", into / "spare", copy_function=os.link)
