"""LoRA adapters as vLLM 0.31 to 0.33 have them: the API server's list of names, and what a core keeps in memory.

Measured on 0.32.0: an unloaded name goes from the list only; requests in flight keep what they use. The prefix cache
tells adapters apart by name and path. What the least recently used adapter holds is dropped beyond --max-cpu-loras and
read again from its path for the next request; when that fails, EngineCore dies.
"""

from __future__ import annotations

import hashlib
import json
import struct
import typing as t
from collections import OrderedDict
from pathlib import Path


class Adapter(t.NamedTuple):
    """What travels with a request. ``number`` is another one for each load."""

    name: str
    number: int
    path: str


class Invalid(Exception):
    """The adapter cannot be used; the message is vLLM's."""


class NotFound(Invalid):
    pass


def read(adapter: Adapter, options: t.Any) -> str:
    """Identity of the values that have an effect: "" for an adapter of zeros."""
    try:
        config = json.loads((Path(adapter.path) / "adapter_config.json").read_text())
        data = (Path(adapter.path) / "adapter_model.safetensors").read_bytes()
    except FileNotFoundError:
        raise NotFound(f"Loading lora {adapter.name} failed: No adapter found for <path>") from None
    rank = max([config["r"], *config.get("rank_pattern", {}).values()])
    if rank > options.max_lora_rank:
        raise Invalid(f"LoRA rank {rank} is greater than max_lora_rank {options.max_lora_rank}.")
    body = data[8 + struct.unpack_from("<Q", data)[0] :]
    return hashlib.sha256(body).hexdigest() if any(body) else ""


class Memory:
    """A core's adapters, the least recently used one first, and whose blocks its prefix cache has."""

    def __init__(self, options: t.Any) -> None:
        self.options = options
        self.room = options.max_cpu_loras or options.max_loras
        self.held: OrderedDict[int, str] = OrderedDict()
        self.prefixes: dict[tuple[str, str, str], str] = {}

    def add(self, adapter: Adapter, noop: bool = False) -> None:
        if adapter.number not in self.held:
            content = read(adapter, self.options)
            self.held[adapter.number] = "" if noop else content
        self.held.move_to_end(adapter.number)
        while len(self.held) > self.room:
            self.held.popitem(last=False)

    def content(self, base: str, adapter: Adapter, prompt: str) -> str:
        """What computes this request: old blocks of the prefix cache beside new ones make a third thing."""
        own = self.held[adapter.number]
        cached = self.prefixes.setdefault((adapter.name, adapter.path, prompt), own)
        if cached != own:
            own = f"{cached}|{own}"
        return f"{base}+{own}" if own else base

    def lose(self) -> None:
        """Still listed and held, without effect."""
        for number in self.held:
            self.held[number] = ""


def write(folder: Path, values: str, rank: int = 8, base: str = "tiny") -> Path:
    """Make an adapter's directory with these values; "" for one of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    body = hashlib.shake_256(values.encode()).digest(64) if values else bytes(64)
    header = {"base_model.model.layers.0.lora_A.weight": {"dtype": "BF16", "shape": [32], "data_offsets": [0, 64]}}
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
