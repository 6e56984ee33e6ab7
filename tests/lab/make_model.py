#!/usr/bin/env python3
"""Makes a tiny model that real vLLM serves on a CPU: random weights in the shape of Qwen3, and a tokenizer.

Usage: make_model.py DIRECTORY [SEED]

Random weights are enough for lifecycle tests: at temperature 0 they answer the same tokens every time, and another
seed answers others. Needs the packages of a vLLM runtime (torch, transformers, tokenizers).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LINES = [
    "The engine is withdrawn, drained, changed, proved and admitted again.",
    "A stream that ends early is a cut stream, whatever its last line says.",
    "Weights, sockets, ranks and adapters; tokens per second; memory in MiB.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
]
END = "<|endoftext|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def main(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,  # 16 crashes the CPU attention kernel
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,  # runs to max_tokens, so a client knows how many tokens it is owed
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, safe_serialization=True)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 0)
