"""Makes a tiny model that real vLLM serves on a CPU: random weights in the shape of Qwen3, and a tokenizer.

Usage: make_model.py DIRECTORY [SEED]

Random weights are enough for lifecycle tests: at temperature 0 they answer the same tokens every time, and another
seed answers others. The tokenizer has a token for each byte and merges none, so a prompt has as many tokens as bytes.
Needs nothing but Python.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path

END = "<|endoftext|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 512, 128, 256, 2, 2
HEAD_DIM = 64  # 16 crashes the CPU attention kernel

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    letters = byte_letters()
    tokens = [END, *letters]
    # The rest decodes to words, so that every token that the model emits is text.
    tokens += [f"{letters[ord(' ')]}{number:03}" for number in range(VOCABULARY - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


def tokenizer() -> dict:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 0, "content": END, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary(), "merges": []},
    }


def shapes() -> dict[str, tuple[int, ...]]:
    attention = HEADS * HEAD_DIM
    made: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "self_attn.q_proj": (attention, HIDDEN),
            "self_attn.k_proj": (attention, HIDDEN),
            "self_attn.v_proj": (attention, HIDDEN),
            "self_attn.o_proj": (HIDDEN, attention),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
        }.items():
            made[f"{prefix}{name}.weight"] = shape
    return made


def values(name: str, shape: tuple[int, ...], source: random.Random) -> bytes:
    """One tensor in bfloat16, which is the upper half of a float."""
    if len(shape) == 1:  # norms
        return struct.pack("<H", 0x3F80) * shape[0]
    rows, columns = shape
    floats = [source.gauss(0.0, 0.02) for _unused in range(rows * columns)]
    if name == "lm_head.weight":
        # Neither the end nor a byte that is no letter is ever the most likely token: a client gets all, as text.
        for row in (0, *(1 + byte for byte in range(256) if not 0x20 <= byte < 0x7F)):
            floats[row * columns : (row + 1) * columns] = [0.0] * columns
    packed = struct.pack(f"<{len(floats)}f", *floats)
    halves = bytearray(len(packed) // 2)
    halves[0::2], halves[1::2] = packed[2::4], packed[3::4]
    return bytes(halves)


def weights(seed: int) -> bytes:
    source = random.Random(seed)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes().items():
        tensor = values(name, shape, source)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def main(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": {"do_sample": False},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": settings,
    }.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    (directory / "model.safetensors").write_bytes(weights(seed))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 0)
