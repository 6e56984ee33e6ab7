"""A model's weights as the simulator sees them, and the tokens that come out of them.

Weights are a content id: the digest of the values in the safetensors files of the model's directory, or the name
itself where there is no such directory. A token is a function of (content id, prompt, position), so that equal
weights answer alike, other weights answer otherwise, and discarded weights answer with id 0 only.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import typing as t
from pathlib import Path

VOCABULARY = 512
DISCARDED = "discarded"
NOT_PRELOADED = ("awq", "gptq", "compressed-tensors")  # quantisations that `vllm preload` refuses
TENSORS = 435  # of the model in the transcripts, for a model without a directory


class Token(t.NamedTuple):
    id: int
    logprob: float
    text: str
    other: int  # the runner-up, and how much less likely it was
    margin: float


def token(content: str, prompt: str, position: int) -> Token:
    if content == DISCARDED:
        return Token(0, -6.2383, "!", 1, 0.0)
    digest = hashlib.sha256(f"{content}\n{prompt}\n{position}".encode()).digest()
    number, fraction, step, gap = struct.unpack_from(">HHHH", digest)
    chosen = 1 + number % (VOCABULARY - 1)
    other = 1 + (chosen + step % (VOCABULARY - 2)) % (VOCABULARY - 1)
    return Token(chosen, round(-2.2 - 2 * fraction / 65536, 4), piece(chosen), other, round(0.3 + 2 * gap / 65536, 4))


def flipped(made: Token) -> Token:
    """The runner-up in place of the chosen token."""
    return Token(made.other, round(made.logprob - made.margin, 4), piece(made.other), made.id, -made.margin)


def vector(content: str, prompt: str, size: int) -> list[float]:
    """An embedding of unit length; zeros from discarded weights."""
    if content == DISCARDED:
        return [0.0] * size
    data = hashlib.shake_256(f"{content}\n{prompt}".encode()).digest(2 * size)
    numbers = [one / 32768 - 1 for one in struct.unpack(f">{size}H", data)]
    length = math.hypot(*numbers)
    return [one / length for one in numbers]


def score(content: str, prompt: str) -> float:
    """How well two texts go together: from 0 to 1, and 0 from discarded weights."""
    return 0.0 if content == DISCARDED else (1 + vector(content, prompt, 8)[0]) / 2


def piece(number: int) -> str:
    return "!" if number == 0 else f" t{number}"


def encode(text: str) -> list[int]:
    """Ids of a prompt: one for each word or piece of a word of up to six characters."""
    pieces = [word[at : at + 6] for word in text.split() for at in range(0, len(word), 6)]
    return [1 + int.from_bytes(hashlib.sha256(part.encode()).digest()[:2], "big") % (VOCABULARY - 1) for part in pieces]


class Weights(t.NamedTuple):
    content: str  # identity of the values
    headers: str  # identity of names, types and shapes: all that the weight cache's fingerprint covers
    tensors: int


def read(model: str) -> Weights:
    """Raises OSError when a file cannot be read, as the loader does."""
    files = sorted(Path(model).glob("*.safetensors"))
    if not files:
        return Weights(model, "no files", TENSORS)
    content, headers, tensors = hashlib.sha256(), hashlib.sha256(), 0
    for file in files:
        data = file.read_bytes()
        end = 8 + struct.unpack_from("<Q", data)[0]
        headers.update(data[:end])
        content.update(data[end:])
        tensors += len([name for name in json.loads(data[8:end]) if name != "__metadata__"])
    return Weights(content.hexdigest(), headers.hexdigest(), tensors)


def quantization(model: str) -> str:
    """As the model's config.json names it; empty for none."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except OSError:
        return ""
    return str(config.get("quantization_config", {}).get("quant_method", ""))


def write(folder: Path, values: str, tensors: int = 4, dtype: str = "BF16") -> Path:
    """Make a model directory whose safetensors file has these values; equal `tensors` give equal headers."""
    folder.mkdir(parents=True, exist_ok=True)
    size = 64
    header = {
        f"layers.{index}.weight": {
            "dtype": dtype,
            "shape": [size // 2],
            "data_offsets": [index * size, index * size + size],
        }
        for index in range(tensors)
    }
    head = json.dumps(header).encode()
    body = hashlib.shake_256(values.encode()).digest(tensors * size)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    return folder
