"""Command line of the simulated `vllm serve`: vLLM's own names, and what only the simulator knows."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import typing as t
from pathlib import Path


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model_tag", nargs="?")
    add("--model", default="/models/sim")
    add("--served-model-name")
    add("--config", type=Path, help="vLLM's flat YAML file; options after it win")
    add("--dtype", default="bfloat16")
    add("--quantization")
    add("--revision")
    add("--max-model-len", type=int, default=2048)
    add("--tensor-parallel-size", type=int, default=1)
    add("--gpu-memory-utilization", type=float, default=0.5)
    add("--max-num-seqs", type=int, default=256)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--uds", type=Path, required=True)
    add("--headless", action="store_true", help="no API server: it lives, and works for a head elsewhere")
    add("--api-key", default=os.environ.get("VLLM_API_KEY", ""))
    add("--shutdown-timeout", type=float, default=0)
    add("--data-parallel-size", type=int, default=1)
    add("--enable-sleep-mode", action="store_true")
    add("--enable-lora", action="store_true")
    add("--max-lora-rank", type=int, default=16)
    add("--max-loras", type=int, default=1)
    add("--max-cpu-loras", type=int)
    add("--enable-server-load-tracking", action="store_true")
    add("--disable-log-stats", action="store_true")
    add("--runner", choices=["auto", "generate", "pooling"], default="auto")
    add("--convert", choices=["auto", "none", "embed", "classify"], default="auto")
    add("--max-logprobs", type=int, default=20)
    add("--load-format", default="auto")
    add("--model-loader-extra-config", type=json.loads, default={})


def add_simulator_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--version", default="0.33.0", help="which vLLM to be: 0.31.x, 0.32.x, 0.33.x")
    add("--state", type=Path, help="directory of faults.json, requests.jsonl, engine.json (default: beside the socket)")
    add("--ledger", default=os.environ.get("SIM_LEDGER", ""), help="GPU memory; without it there is no GPU")
    add("--gpu", action="append", default=[], help="UUID; default: the first of the ledger. Once for each rank")
    add("--weights-mib", type=int, default=13294)
    add("--residue-mib", type=int, default=1502, help="what a sleeper keeps: context and graphs")
    add("--speed", type=float, default=100, help="divides the measured times of sleep, wake, reload and stop")
    add("--token-rate", type=float, default=2000, help="tokens a second for each request")
    add("--start-delay", type=float, default=0, help="seconds before it listens, not divided")
    add("--fault", action="append", default=[], help="NAME[=ARG], see faults.py")


def flat_yaml(path: Path) -> list[str]:
    """`name: value` lines as vLLM's --config takes them; nested values are not needed here."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        name, value = name.strip().strip("\"'"), value.strip()
        if not colon or name.startswith(("#", "-")):
            continue
        if value.lower() == "true":
            words.append(f"--{name.replace('_', '-')}")
        elif value and value.lower() not in ("false", "null"):
            if value[0] in "\"'":
                value = value[1 : value.rindex(value[0])]
            # In one word: the value of an option that is not known here would be taken for the model.
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def parse(argv: list[str], kind: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"simulated {kind}", allow_abbrev=False)
    add_vllm_options(parser)
    add_simulator_options(parser)
    if kind == "engine":
        add_serve_options(parser)
    else:
        add_preload_options(parser)
    words = [word for word in argv if word not in ("serve", "preload")]
    if "--config" in words:
        words = flat_yaml(Path(words[words.index("--config") + 1])) + words
    words = shlex.split(os.environ.get("SIM_ARGS", "")) + words
    options, _other = parser.parse_known_args(words)  # vLLM has hundreds of options that change nothing here
    options.model = options.model_tag or options.model
    options.served_model_name = options.served_model_name or options.model
    options.minor = int(options.version.split(".")[1])
    options.dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    options.allow_lora_updates = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    if options.minor not in (31, 32, 33):
        parser.error(f"--version {options.version}: only 0.31, 0.32 and 0.33 are known")
    return options


def add_preload_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--weight-cache-socket-dir", type=Path)
    add("--weight-cache-health-port", type=int)
    add("--weight-cache-health-host", default="0.0.0.0")
    add("--daemon-extra-mib", type=int, default=588, help="what a daemon holds beside the weights")
    add("--load-time", type=float, default=0, help="seconds until it is ready, not divided")


def gpus_of(options: argparse.Namespace, ledger: t.Any) -> list[str]:
    return list(options.gpu) or [gpu.uuid for gpu in ledger.gpus()]
