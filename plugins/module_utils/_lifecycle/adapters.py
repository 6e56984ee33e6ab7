# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""LoRA adapters of an engine as declared state: what is loaded, what ought to be, the steps between. Looks and plans.

What vLLM does was measured on 0.32.0 and read in 0.31 to 0.33:

- A load answers 200 for an adapter that has no effect, and for one of another model whose tensors are only smaller.
- /v1/models names an adapter's path (``root``). What the files held when they were read, nobody says.
- The prefix cache tells adapters apart by name and path. When other content is loaded under both, prompts from before
  get answers that are neither the old adapter's nor the new one's, until the cache is reset.
- An adapter in use can be unloaded: its requests finish, the next ones get 404.
- Beyond ``max-cpu-loras`` the one that was used least recently is dropped and read again for its next request. If its
  files are gone by then, the whole engine dies.

So we keep a record of what was loaded, by the manifest of its files, and each adapter is proved by its answers.
"""

from __future__ import annotations

import json
import posixpath
import re
import socket
import typing as t
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from . import config, lease, store
from .config import AdapterConfig, EngineConfig
from .engine import Served, environment
from .errors import LifecycleError, Refused, UnknownState, UsageError
from .unit import UnitState

if t.TYPE_CHECKING:
    from .answers import Answer

# What only engines with adapters need is imported where they need it: each call of a module reads what it imports.
FILE = "adapters.json"
VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# A manifest that is wanted only if it costs nothing.
PEEK_TIMEOUT = 0.5
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
READ = re.compile(r"adapter_config\.json|(adapter_model|new_embeddings)\.(safetensors|bin|pt)")
# Log probabilities, or vectors by their length, that differ by less are rounding.
MARGIN = 0.001


@dataclass(frozen=True)
class Record:
    """What we loaded into the process ``main_pid``, which ``invocation`` tells from a later one of that number.

    ``adapters`` has for each name its ``path``, the ``digest`` of its files and whether it is ``proved``. ``cached``
    lists name, path and digest of all whose blocks the prefix cache may still hold; "" for content that is not known.
    """

    main_pid: int
    invocation: str = ""
    adapters: dict[str, dict[str, t.Any]] = field(default_factory=dict)
    cached: list[list[str]] = field(default_factory=list)


def read_record(engine: str, unit: UnitState) -> Record:
    """The record of the process that runs now; an empty one where there is none.

    :raises UsageError: the file is not one that we wrote.
    """
    path = store.state_dir(engine) / FILE
    empty = Record(unit.main_pid, unit.invocation)
    value = store.read_json(path)
    if value is None:
        return empty
    try:
        record = t.cast(Record, config.build(Record, value, str(path)))
        whole = all({"path", "digest", "proved"} <= set(one) for one in record.adapters.values())
        if not whole or any(len(row) != 3 for row in record.cached):
            raise UsageError(f"{path} is no record of adapters", entry="record-broken")
    except UsageError as exc:
        raise UsageError(
            str(exc),
            entry="record-broken",
            next_step=f"remove {path}; the adapters are then loaded anew, which wants the engine drained",
        ) from exc
    return record if (record.main_pid, record.invocation) == (unit.main_pid, unit.invocation) else empty


def write_record(engine: str, record: Record) -> None:
    lease.record(engine, FILE, asdict(record))


@dataclass(frozen=True)
class Loaded:
    """An adapter that the engine lists. ``digest`` is "" where we have not loaded it, or not into this process."""

    name: str
    path: str
    parent: str
    digest: str = ""
    proved: bool = False


@dataclass(frozen=True)
class EngineAdapters:
    """The adapters of one engine. ``loaded`` is None where the engine was not seen.

    ``enabled`` says that it was configured with enable-lora. ``left`` explains for each declared adapter why it is not
    there as declared; content is compared only where its digest is known without hashing.
    """

    enabled: bool
    declared: list[AdapterConfig]
    loaded: list[Loaded] | None
    left: dict[str, str]

    @property
    def in_use(self) -> bool:
        """Whether LoRA is on, by configuration or by what is loaded."""
        return self.enabled or bool(self.loaded)

    @property
    def kept(self) -> bool:
        """Whether there is something to look at again after a wake."""
        return bool(self.declared) or any(one.digest for one in self.loaded or [])


class Wanted(t.NamedTuple):
    """An adapter that ought to be loaded, and the digest of its files now; None where that is not known."""

    adapter: AdapterConfig
    digest: str | None


class Action(t.NamedTuple):
    """One thing to do with an engine's adapters. ``name`` is an adapter's, "" where it is about all of them."""

    kind: str
    says: str
    name: str = ""
    mutates: bool = True


def digest_of(path: str, *, user: str = "", timeout: float = 3600.0, remember: bool = True) -> str:
    """The digest of those files of an adapter that vLLM reads, "sha256:" and 64 hex digits.

    :raises LifecycleError: as of weights.take.
    """
    from . import weights

    files = weights.take(path, user=user, timeout=timeout, remember=remember).files
    return weights.digest_of("full", {name: one for name, one in files.items() if READ.fullmatch(name)})


def observe_adapters(engine: EngineConfig, unit: UnitState | None, served: t.Sequence[Served] | None) -> EngineAdapters:
    """Looks only, and hashes nothing.

    :raises UsageError: the record, or the files of a declared adapter, cannot be read.
    """
    loaded = None
    left: dict[str, str] = {}
    if unit is not None and served is not None:
        loaded = join(read_record(engine.engine, unit), served)
        there = {one.name: one for one in loaded}
        for adapter in engine.adapters:
            if why := differs(Wanted(adapter, _peek(adapter.path)), there.get(adapter.name)):
                left[adapter.name] = why
    return EngineAdapters(engine.traits.lora, engine.adapters, loaded, left)


def join(record: Record, served: t.Sequence[Served]) -> list[Loaded]:
    """What the engine lists, with what we know of it."""
    found = []
    for one in served:
        if not one.parent:
            continue
        known = record.adapters.get(one.name)
        if known is not None and known["path"] == one.root:
            found.append(Loaded(one.name, one.root, one.parent, str(known["digest"]), bool(known["proved"])))
        else:
            found.append(Loaded(one.name, one.root, one.parent))
    return found


def _peek(path: str) -> str | None:
    try:
        return digest_of(path, timeout=PEEK_TIMEOUT, remember=False)
    except LifecycleError:
        return None


def differs(wanted: Wanted, there: Loaded | None) -> str:
    """Why an adapter is not there as it ought to be, "" when it is. Pure."""
    if there is None:
        return "it is not loaded"
    if there.path != wanted.adapter.path:
        return f"it was loaded from {there.path}"
    if not there.digest:
        return "it was loaded by someone else, so what it holds is not known"
    if wanted.digest is not None and there.digest != wanted.digest:
        return f"its files have changed since it was loaded ({there.digest}, now {wanted.digest})"
    if wanted.adapter.prove and not there.proved:
        return "it is not proved"
    return ""


def plan_adapters(
    wanted: t.Sequence[Wanted],
    there: t.Sequence[Loaded],
    cached: t.Sequence[t.Sequence[str]],
    *,
    exact: bool = False,
    again: bool = False,
) -> list[Action]:
    """The actions from what is loaded to what is wanted. Pure.

    What goes is unloaded first; then the prefix cache is reset where it may hold blocks of other content; then comes
    what is missing, each adapter proved before the next.

    :param cached: as in Record.
    :param exact: unload what is not wanted.
    :param again: prove also what was proved before.
    """
    known = {one.name: one for one in there}
    names = {one.adapter.name for one in wanted}
    unload = [_unload(one.name) for one in there if exact and one.name not in names]
    load: list[Action] = []
    stale = False
    for one in wanted:
        adapter, loaded = one.adapter, known.get(one.adapter.name)
        why = differs(one, loaded)
        proof = [_prove(adapter.name)] if adapter.prove else []
        if loaded is not None and (not why or _only_unproved(one, loaded)):
            load += proof if why or again else []
            continue
        held = [row[2] for row in cached if (row[0], row[1]) == (adapter.name, adapter.path)]
        if loaded is not None:
            unload.append(_unload(adapter.name, why))
            if loaded.path == adapter.path:
                held.append(loaded.digest)
        stale = stale or any(digest != one.digest or not digest for digest in held)
        load += [Action("load", f"load adapter '{adapter.name}' from {adapter.path}", adapter.name), *proof]
    reset = [Action("reset_cache", "reset its prefix cache, which may hold other content of an adapter")]
    return [*unload, *(reset if stale else []), *load]


def _only_unproved(wanted: Wanted, loaded: Loaded) -> bool:
    return not differs(wanted._replace(adapter=replace(wanted.adapter, prove=False)), loaded)


def _unload(name: str, why: str = "") -> Action:
    return Action("unload", f"unload adapter '{name}'" + (f": {why}" if why else ""), name)


def _prove(name: str) -> Action:
    return Action("prove", f"prove adapter '{name}' by its answers", name, mutates=False)


def check_declared(engine: EngineConfig, wanted: t.Sequence[AdapterConfig]) -> None:
    """Refuse names and paths that cannot be right. Looks at no file.

    :raises UsageError: names the adapter.
    """
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    seen: set[str] = set()
    for one in wanted:
        why = ""
        if not NAME.fullmatch(one.name):
            why = "its name has other characters than letters, digits and . _ : / -, or more than 128"
        elif one.name == engine.served_model_name:
            why = "that is the name of the model itself"
        elif one.name in seen:
            why = "there are two of that name"
        elif not posixpath.isabs(one.path) or posixpath.normpath(one.path) != one.path or one.path.startswith("//"):
            why = f"its path '{one.path}' is not absolute and plain (no '..', no slash twice or at its end)"
        if why:
            raise UsageError(
                f"{here}: adapter '{one.name}': {why}",
                entry="adapter-refused",
                next_step="correct adapters and run this again",
            )
        seen.add(one.name)


def inspect(engine: EngineConfig, adapter: AdapterConfig) -> None:
    """Whether an adapter's files are what vLLM takes, and what this engine has room for. Reads its configuration alone.

    :raises UsageError: a file is missing, or the service user cannot read it.
    :raises Refused: another base model, or a higher rank, than the engine has.
    """
    from . import checkpoint

    here = f"engine '{engine.engine}' on {socket.gethostname()}: adapter '{adapter.name}'"
    seen = checkpoint.scan(adapter.path)
    checkpoint.check_readable(adapter.path, seen, engine.user)
    if not {"adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"} & set(seen):
        raise UsageError(
            f"{here}: {adapter.path} has no adapter_model.safetensors",
            entry="adapter-refused",
            next_step="give the directory that holds it, beside adapter_config.json",
        )
    try:
        value = json.loads((Path(adapter.path) / "adapter_config.json").read_text(encoding="utf-8"))
        ranks = [value["r"], *(value.get("rank_pattern") or {}).values()]
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError("a rank is no integer")
        rank, base = max(ranks), str(value.get("base_model_name_or_path") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError(
            f"{here}: {adapter.path}/adapter_config.json is not one of a LoRA adapter ({exc!r})",
            entry="adapter-refused",
            next_step="copy the adapter's directory again, as it was saved",
        ) from exc
    if adapter.base and base != adapter.base:
        raise Refused(
            f"{here} was made for the base model '{base}', not for '{adapter.base}'; vLLM does not compare them, and "
            "loads even what does not fit",
            entry="adapter-refused",
            next_step="correct the adapter's path or base",
        )
    limit = engine.lora.max_rank if engine.lora else None
    if limit is not None and rank > limit:
        raise Refused(
            f"{here} has rank {rank}, and the engine takes {limit} at most (max-lora-rank)",
            entry="adapter-refused",
            next_step=f"set max-lora-rank: {rank} or more in the engine's config and restart it",
        )


def check_room(engine: EngineConfig, names: t.Collection[str]) -> None:
    """
    :raises Refused: more adapters than the engine keeps in memory.
    """
    room = (engine.lora.max_cpu_loras or engine.lora.max_loras) if engine.lora else len(names)
    if len(names) > room:
        raise Refused(
            f"engine '{engine.engine}' on {socket.gethostname()} keeps {room} adapter(s) in memory (max-cpu-loras) and "
            f"would have {len(names)}: {', '.join(sorted(names))}. vLLM would read dropped ones again while it serves, "
            "and die when their files are gone",
            entry="adapter-refused",
            next_step=f"set max-cpu-loras: {len(names)} or more in the engine's config and restart it, or use fewer",
        )


def check_enabled(engine: EngineConfig) -> None:
    """
    :raises UsageError: the engine was configured without LoRA.
    """
    if not engine.traits.lora:
        raise UsageError(
            f"engine '{engine.engine}' on {socket.gethostname()} is configured without LoRA",
            entry="adapter-refused",
            next_step="set enable-lora: true in its config, run baremetal.vllm.site and restart it",
        )


def check_updating(engine: EngineConfig, capabilities: t.Collection[str] | None) -> None:
    """
    :raises Refused: adapters cannot be changed in this process.
    :raises UnknownState: that was not seen.
    """
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    if capabilities is None:
        raise UnknownState(
            f"{here}: whether adapters can be loaded into it was not seen",
            entry="state-unknown",
            next_step="look at vllm_info, and run this again",
        )
    if "lora_update" in capabilities:
        return
    raise Refused(
        f"{here} has no /v1/load_lora_adapter (404): {VARIABLE}=1 was not set when it started",
        entry="adapter-refused",
        next_step="declare the adapters in vllm_engine_instances, with which the role sets it, and restart the engine",
    )


def preflight(engine: EngineConfig) -> None:
    """Before the engine starts: what would otherwise show after minutes. The last process's record ends with it.

    :raises LifecycleError: as of the checks above; or the engine will not be able to load adapters.
    """
    store.remove(store.state_dir(engine.engine) / FILE)
    if not engine.adapters:
        return
    check_enabled(engine)
    check_declared(engine, engine.adapters)
    if environment(Path(engine.env_file), VARIABLE).strip().lower() not in ("1", "true"):
        raise UsageError(
            f"engine '{engine.engine}' on {socket.gethostname()} has adapters, and {engine.env_file} does not set "
            f"{VARIABLE}=1",
            entry="declaration-broken",
            next_step="run baremetal.vllm.site again, which writes it",
        )
    for adapter in engine.adapters:
        inspect(engine, adapter)
    check_room(engine, [adapter.name for adapter in engine.adapters])


def has_effect(model: Answer, again: Answer, adapter: Answer) -> bool:
    """Whether an adapter's answer differs from the model's, by more than two answers of the model differ. Pure.

    A busy engine takes now this and now that one of two tokens that are as likely as each other, and its log
    probabilities move with what else is in the batch. A question whose answer from the model itself is not stable shows
    nothing.
    """
    from .answers import Tolerance, compare

    noise = compare(model, again, Tolerance())
    if noise.why:
        return False
    margin = max(MARGIN, 3 * noise.distance)
    return bool(compare(model, adapter, Tolerance(margin, margin)).why)
