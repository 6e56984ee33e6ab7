"""What one EngineCore holds of GPU memory, by the states measured on the H200, written to the ledger."""

from __future__ import annotations

import typing as t

from .ledger import Ledger, OutOfMemory

AWAKE = frozenset(("weights", "kv_cache"))


class Memory:
    """`residue` (context, graphs) stays as long as the process; weights and KV cache come and go by their tags."""

    def __init__(self, ledger: Ledger | None, uuids: list[str], options: t.Any, pid: int) -> None:
        self.ledger = ledger
        self.uuids = uuids
        self.pid = pid
        self.residue = options.residue_mib
        self.weights = options.weights_mib // max(1, options.tensor_parallel_size)
        self.utilization = options.gpu_memory_utilization
        self.kv = 0
        self.mapped: set[str] = set()
        self.leak = 0  # what a fault keeps or leaves behind

    def start(self, external: int, own_weights: bool, kv_share: float = 1.0) -> None:
        """Claim everything. `external`: MiB of weights that a daemon holds for us, counted as ours by vLLM."""
        if not own_weights:
            self.weights = 0
        if self.ledger is None:
            return
        for uuid in self.uuids:
            gpu = self.ledger.gpu(uuid)
            wanted = int(gpu.total * self.utilization)
            free = self.ledger.free(uuid) + external
            if free < wanted:
                raise ValueError(
                    f"Free memory on device cuda:0 ({free / 1024:.2f}/{gpu.total / 1024:.2f} GiB) on startup is less "
                    f"than desired GPU memory utilization ({self.utilization}, {wanted / 1024:.2f} GiB). Decrease GPU "
                    "memory utilization or reduce GPU memory used by other processes."
                )
            if external > wanted:
                raise ValueError(
                    f"Externally held weights ({external / 1024:.2f} GiB) exceed the requested GPU memory "
                    f"({wanted / 1024:.2f} GiB)"
                )
            self.kv = int((wanted - external - self.weights - self.residue) * kv_share)
        if self.kv <= 0:
            raise ValueError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
                "the engine."
            )
        self.set(set(AWAKE))

    def total(self, mapped: set[str]) -> int:
        parts = {"weights": self.weights, "kv_cache": self.kv}
        return int(self.residue + self.leak + sum(parts[tag] for tag in mapped))

    def set(self, mapped: set[str]) -> None:
        """Weights first, then KV cache; what fits stays mapped when the rest does not fit, as on the GPU."""
        if self.ledger is None:
            self.mapped = set(mapped)
            return
        steps = [mapped & self.mapped, (mapped & self.mapped) | (mapped & {"weights"}), set(mapped)]
        for step in steps:
            for uuid in self.uuids:
                self.ledger.resize(uuid, self.pid, self.total(step))
            self.mapped = step

    def linger(self, seconds: float) -> None:
        """Let the memory come back some time after the process is gone."""
        if self.ledger is not None:
            for uuid in self.uuids:
                self.ledger.hold(uuid, self.ledger.processes(uuid).get(self.pid, 0), seconds)


__all__ = ["AWAKE", "Memory", "OutOfMemory"]
