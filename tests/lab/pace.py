"""Gives vLLM on a CPU the pace of a GPU: each step of the engine takes a while in which no processor is busy.

The tiny model's steps take a millisecond of a processor each: engines under load would fight over all processors there
are, and a start beside two of them would take minutes. On a GPU a step takes tens of milliseconds, and the processor
waits. vLLM loads this as a logits processor: `--logits-processors pace:Pace`, with this directory in PYTHONPATH.
"""

from __future__ import annotations

import os
import time

from vllm.v1.sample.logits_processor import LogitsProcessor


class Pace(LogitsProcessor):
    def __init__(self, *_args: object) -> None:
        self.seconds = float(os.environ.get("PACE_SECONDS", "0.015"))

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM leaves the invariant ones out at temperature 0

    def update_state(self, _batch_update: object) -> None:
        pass

    def apply(self, logits: object) -> object:
        time.sleep(self.seconds)
        return logits
