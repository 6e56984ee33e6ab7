"""One EngineCore: scheduler, pause states, sleep tags, weights; the state machine of vLLM 0.31 to 0.33.

Times are those measured on the H200, divided by --speed. The process that owns the GPU memory is a forked child
(see engine.py), so that SIGKILL, SIGSTOP and SIGTERM to either process have the effects they have on the real pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
import typing as t
from pathlib import Path

from . import lora, model
from .faults import Switches
from .gpumem import AWAKE, Memory, OutOfMemory

TICK = 0.005
SLEEP_FIRST, SLEEP_1, SLEEP_2, SLEEP_ZERO_COPY = 10.9, 0.39, 0.10, 0.09
WAKE_1, WAKE_2, WAKE_WEIGHTS, WAKE_KV, WAKE_ZERO_COPY = 0.40, 0.21, 0.08, 0.10, 0.12
RELOAD, RELEASE_KV = 2.5, 0.08


class EngineDead(Exception):
    """EngineCore is gone."""


class CallFailed(Exception):
    """A utility call failed inside EngineCore: 500 for the caller, the engine lives on."""


class Paused(Exception):
    """0.33: no new request while paused by abort or wait."""


class Sequence:
    """One request inside the engine. `news` carries lists of tokens, then a finish reason."""

    numbers = itertools.count()

    def __init__(
        self, prompt: str, prompt_ids: list[int], max_tokens: int, adapter: lora.Adapter | None = None, salt: str = ""
    ) -> None:
        self.adapter = adapter
        self.computed_by = ""  # base and adapter, once it runs
        self.number = next(self.numbers)
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.max_tokens = max_tokens
        self.made = 0
        self.owed = 0.0
        self.pools = False  # owes an embedding or a score, and no tokens
        self.cached_as = f"{salt}|{prompt}"
        self.cached = False
        self.garbled = False
        self.news: asyncio.Queue[list[model.Token] | str] = asyncio.Queue()


class Core:
    def __init__(self, index: int, pid: int, options: t.Any, faults: Switches, memory: Memory) -> None:
        self.index = index
        self.pid = pid
        self.options = options
        self.faults = faults
        self.memory = memory
        self.content = ""
        self.zero_copy = False
        self.level = 0  # the level really reached by the last sleep
        self.asleep: set[str] = set()
        self.pause: str | None = None  # None, new (nothing new is admitted), all (nothing runs)
        self.reject_new = False
        self.host_copy = False
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.seen: dict[str, float] = {"running": 0, "capacity": 0, "deferred": 0}  # gauges: the last step's view
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.generated = 0
        self.prompted = 0
        self.remembered: set[str] = set()  # prompts in the prefix cache
        self.adapters = lora.Memory(options)
        self.adapters_seen: dict[str, float] = {}  # names with requests, joined, and when that was the last step's view
        self.stale: set[str] = set()  # prompts whose cached blocks outlived their KV memory
        self.work = asyncio.Event()
        self.stopping: str | None = None
        self.output_hangs = False
        self.dead = False

    # life of the process

    def is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        except OSError:
            return False

    def check(self) -> None:
        """Notice the end of the child; its memory goes with it."""
        if self.dead:
            return
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self.bury()

    def kill(self) -> None:
        if not self.dead:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still this child's
            os.waitpid(self.pid, 0)
            self.bury()

    def bury(self) -> None:
        self.dead = True
        for sequence in [*self.running, *self.waiting]:
            sequence.news.put_nowait("dead")
        self.running, self.waiting = [], []
        self.work.set()

    async def call(self) -> None:
        """The way of every utility call into EngineCore: hangs when that hangs, fails when that is gone."""
        while True:
            self.check()
            if self.dead:
                raise EngineDead
            if self.stopping:
                raise CallFailed("Server shutting down")
            if not self.is_stopped() and self.faults.get("hung") is None:
                return
            await asyncio.sleep(TICK)

    async def take(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.options.speed)

    # scheduler

    def add(self, sequence: Sequence) -> None:
        if self.dead:
            raise EngineDead
        if self.reject_new:
            raise Paused
        self.waiting.append(sequence)
        self.work.set()

    def has_work(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and self.pause is None)

    def observe(self) -> None:
        """vLLM's gauges move only when the scheduler steps: what is queued while nothing runs is not in them."""
        stuck = self.faults.get("scheduler_stuck") is not None
        self.seen["running"] = len(self.running)
        self.seen["deferred" if stuck else "capacity"] = len(self.waiting)
        self.seen["capacity" if stuck else "deferred"] = 0
        if self.options.enable_lora:
            names = {one.adapter.name for one in [*self.running, *self.waiting] if one.adapter}
            self.adapters_seen[",".join(sorted(names))] = time.time()

    async def schedule(self) -> None:
        """The scheduler's loop; it ends with the process."""
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            if not self.has_work() or self.pause == "all":
                self.work.clear()
                await self.work.wait()
                last = clock()
                continue
            await asyncio.sleep(TICK)
            self.check()
            if self.dead:
                return
            now = clock()
            elapsed, last = now - last, now
            if self.is_stopped() or self.faults.get("hung") is not None or self.stopping == "stalled":
                continue
            self.step(elapsed)

    def step(self, elapsed: float) -> None:
        stuck = self.faults.get("scheduler_stuck") is not None
        while self.pause is None and self.waiting and len(self.running) < self.options.max_num_seqs and not stuck:
            sequence = self.waiting.pop(0)
            self.prompted += len(sequence.prompt_ids)
            sequence.garbled = sequence.cached_as in self.stale
            sequence.cached = sequence.cached_as in self.remembered
            self.remembered.add(sequence.cached_as)
            if not self.apply_adapter(sequence):
                return
            self.running.append(sequence)
        if self.asleep and self.running and not self.output_hangs:
            self.kill()  # generation with unmapped memory: illegal memory access
            return
        self.observe()
        if stuck or self.output_hangs or self.faults.get("hang_output") is not None:
            return
        for sequence in list(self.running):
            if sequence.pools:
                self.finish(sequence, "stop")
                continue
            cut = self.faults.number("cut_streams", 3)
            short = self.faults.number("short_answers", 1)
            limit = int(min(sequence.max_tokens, cut or 1 << 30, short or 1 << 30))
            sequence.owed += elapsed * (self.faults.number("slow_tokens", 10) or self.options.token_rate)
            count = min(int(sequence.owed), limit - sequence.made)
            if count > 0:
                sequence.owed -= count
                sequence.news.put_nowait([self.token(sequence, sequence.made + step) for step in range(count)])
                sequence.made += count
                self.generated += count
            if sequence.made >= limit:
                self.finish(sequence, "abort" if limit == cut else "length")
        if not self.running:
            self.observe()

    def apply_adapter(self, sequence: Sequence) -> bool:
        """False when that was the end of the engine: an adapter that had been dropped cannot be read again."""
        if sequence.adapter is not None:
            try:
                self.adapters.add(sequence.adapter)
            except lora.Invalid:
                self.waiting.append(sequence)
                self.kill()
                return False
            sequence.computed_by = self.adapters.content(self.content, sequence.adapter, sequence.prompt)
        return True

    def content_for(self, sequence: Sequence) -> str:
        """The weights that answer, with what goes wrong."""
        content = self.content
        if sequence.adapter is not None and content != model.DISCARDED:
            content = sequence.computed_by
        if self.faults.get("garbage") is not None or sequence.garbled:
            return model.DISCARDED
        return content if self.faults.get("wrong_tokens") is None else f"not {content}"

    def token(self, sequence: Sequence, position: int) -> model.Token:
        content = self.content_for(sequence)
        tie, flip = self.faults.number("near_tie", 3), self.faults.number("tokens_flip", 3)
        if flip is not None and position > flip:
            content = f"{content} after another token"
        made = model.token(content, sequence.prompt, position)
        if tie == position:
            made = made._replace(margin=0.02)
        if flip == position:
            made = model.flipped(made)
        off = self.faults.number("logprobs_off", 0.5)
        rounds = self.faults.number("prefix_rounds", 8)
        if rounds == position:
            made = made._replace(margin=0.02)
        if rounds is not None and sequence.cached:
            off = (off or 0) + 0.15
            made = model.flipped(made) if rounds == position else made
        return made if off is None else made._replace(logprob=round(made.logprob - off, 4))

    def finish(self, sequence: Sequence, reason: str, counted: bool = True) -> None:
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                if counted:
                    self.finished[reason] += 1
                sequence.news.put_nowait(reason)
        self.work.set()

    def abort_all(self, counted: bool = True) -> int:
        """`counted`: vLLM counts what the engine aborts, not what a client or /abort_requests ends."""
        sequences = [*self.running, *self.waiting]
        for sequence in sequences:
            self.finish(sequence, "abort", counted)
        if sequences:
            self.observe()
            stale = self.faults.number("gauge_stale", 1)
            if stale is not None:
                self.seen["running"] = stale
        return len(sequences)

    def drop(self, sequence: Sequence) -> None:
        """The client has gone. The gauges learn of it only while the scheduler steps."""
        stepping = sequence in self.running and self.pause != "all"
        self.finish(sequence, "abort", counted=False)
        if stepping:
            self.observe()

    # LoRA adapters

    async def add_lora(self, adapter: lora.Adapter) -> None:
        """Also while paused. Raises CallFailed, and lora.NotFound."""
        await self.call()
        wrong = "LoRA is not enabled. Use --enable-lora to enable LoRA."
        try:
            if self.options.enable_lora:
                if "weights" in self.asleep:
                    self.kill()  # writes to unmapped memory
                    raise EngineDead
                self.adapters.add(adapter, noop=self.faults.get("lora_noop") is not None)
                return
        except lora.NotFound:
            raise
        except lora.Invalid as failed:
            wrong = str(failed)
        text = f"Worker failed with error '{wrong}', please check the stack trace above for the root cause"
        raise CallFailed(f"Call to add_lora method failed: {text}")

    # pause and resume

    async def pause_scheduler(self, mode: str, by_user: bool) -> None:
        await self.call()
        if mode == "abort":
            self.abort_all()
        self.pause = "all" if mode == "keep" else "new"
        if by_user and self.options.minor >= 33:
            self.reject_new = mode != "keep"
        self.work.set()
        if mode == "wait":
            while self.running:
                await asyncio.sleep(TICK)
                self.check()
                if self.dead:
                    raise EngineDead
            while self.faults.get("pause_wait_stuck") is not None:
                await asyncio.sleep(TICK)

    def resume(self) -> None:
        self.pause = None
        self.reject_new = False
        self.work.set()

    # sleep and wake

    def is_sleeping(self) -> bool:
        return self.pause is not None or bool(self.asleep)

    async def sleep(self, level: int, mode: str) -> None:
        if self.faults.get("sleep_noop") is not None or self.faults.get("sleep_rank_awake") == str(self.index):
            await self.call()
            return
        ignored = self.faults.number("sleep_level_ignored", 1)
        level = level if ignored is None else int(ignored)
        await self.pause_scheduler(mode, by_user=False)
        if level < 1 or "weights" in self.asleep:
            return
        own = self.options.enable_sleep_mode and not self.zero_copy
        first = level == 1 and own and not self.host_copy
        await self.take(
            SLEEP_FIRST if first else (SLEEP_1 if level == 1 else SLEEP_2) if own else SLEEP_ZERO_COPY,
        )
        if first and self.faults.get("sleep_host_oom") is not None:
            self.kill()
            raise EngineDead
        self.host_copy = self.host_copy or first
        self.level = level
        self.asleep = {"weights", "kv_cache"}
        self.stale = set(self.remembered) if self.faults.get("prefix_stale") is not None else set()
        self.remembered.clear()
        self.adapters.prefixes.clear()
        if own and level == 2:
            self.content = model.DISCARDED
        if self.options.enable_sleep_mode and self.faults.get("sleep_frees_nothing") is None:
            self.memory.leak += int(self.faults.number("sleep_residue_grows", 512) or 0)
            kept = int(self.faults.number("sleep_keeps", 16384) or 0)
            self.memory.leak += kept
            self.memory.set(set())
            self.memory.leak -= kept
        taken = self.faults.number("memory_taken", 40000)
        if taken is not None and self.memory.ledger is not None:
            for uuid in self.memory.uuids:
                self.memory.ledger.foreign(uuid, int(taken))

    async def wake_up(self, tags: list[str] | None) -> bool:
        """True when nothing is asleep any more; that also ends a pause."""
        await self.call()
        if self.faults.get("wake_noop") is not None:
            return True
        if tags is not None:
            tags = [tag for tag in tags if tag != "scheduling"] or ["scheduling"]
        if self.asleep and tags != ["scheduling"]:
            await self.wake_memory(tags)
        if self.asleep:
            return self.faults.get("wake_half") is not None
        if self.faults.get("wake_hangs_output") is not None:
            self.output_hangs = True
        if self.faults.get("wake_leaves_paused") is None:
            self.resume()
        return True

    async def wake_memory(self, tags: list[str] | None) -> None:
        if tags and not set(tags) <= self.asleep:
            return  # one tag that is not asleep, or no tag at all, makes the whole call do nothing
        wanted = set(tags) if tags else set(self.asleep)
        if tags is None and self.faults.get("wake_half") is not None:
            wanted = {"weights"}
        if len(wanted) == 1:
            await self.take(WAKE_WEIGHTS if "weights" in wanted else WAKE_KV)
        else:
            await self.take(WAKE_ZERO_COPY if self.zero_copy else WAKE_1 if self.level == 1 else WAKE_2)
        try:
            self.memory.set(AWAKE - self.asleep | wanted)
        except OutOfMemory as error:
            text = f"Call to wake_up method failed: Worker failed with error 'CUDA Error: {error}'"
            raise CallFailed(text) from error
        self.asleep -= wanted
        if self.faults.get("lora_lost") is not None:
            self.adapters.lose()

    async def release_kv(self) -> None:
        await self.call()
        problem = None
        if self.pause is None or self.running or self.waiting:
            problem = "release_kv_cache_memory() requires a completed pause first"
        elif self.asleep:
            problem = "release_kv_cache_memory() requires all executor memory to be resident"
        if problem:
            raise CallFailed(f"Call to release_kv_cache_memory method failed: {problem}")
        await self.take(RELEASE_KV)
        self.asleep.add("kv_cache")
        self.level = 0
        self.remembered.clear()
        self.adapters.prefixes.clear()
        if self.options.enable_sleep_mode:
            self.memory.set({"weights"})

    async def reload_weights(self) -> None:
        await self.call()
        if self.faults.get("reload_5xx") is not None:
            raise CallFailed("Call to collective_rpc method failed: Worker failed with error 'KeyError'")
        if self.options.enable_lora and self.options.minor == 31:
            raise CallFailed("Call to collective_rpc method failed: Worker failed with error 'KeyError'")
        if self.options.load_format == "ipc_cache":  # also where it has fallen back to disk
            text = "Worker failed with error 'Model reloading with `ipc_cache` format'"
            raise CallFailed(f"Call to collective_rpc method failed: {text}")
        await self.take(RELOAD)
        if "weights" in self.asleep:
            self.kill()  # writes to unmapped memory
            raise EngineDead
        try:
            fresh = model.read(self.options.model).content
        except OSError as error:
            raise CallFailed(f"Call to collective_rpc method failed: Worker failed with error '{error}'") from error
        if self.faults.get("reload_wrong") is not None:
            fresh = f"not {fresh}"
        if self.faults.get("reload_noop") is None:
            self.content = fresh
            self.adapters.held.clear()  # each is read again for its next request

    async def reset_prefix_cache(self) -> bool:
        await self.call()
        if self.faults.get("reset_fails") is not None or self.running:
            return False
        if self.faults.get("reset_lies") is None:
            self.remembered.clear()
            self.adapters.prefixes.clear()
            self.stale.clear()
        return True

    # shutdown

    def begin_shutdown(self, drain: bool) -> None:
        self.stopping = "draining" if drain else "aborting"
        if not drain:
            self.abort_all()
