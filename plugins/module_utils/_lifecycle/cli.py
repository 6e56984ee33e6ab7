# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command ``vllm-lifecycle``: the units' door to the same library that the modules use.

Exit codes: 0 done, 1 failed and said why, 2 bad usage or configuration, 3 unknown state, 4 deadline, 5 refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import typing as t
from pathlib import Path

from . import config, doors, exposition, golden, golden_change, preload_doors, store, weights
from .errors import LifecycleError, MissingLibrary, UsageError
from .lease import LeaseRequest
from .observe import observe
from .plan import WANTED
from .transition import Wish, change
from .version import VERSION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-lifecycle", description="The lifecycle of a host's vLLM engines.")
    parser.add_argument("--version", action="version", version=f"vllm-lifecycle {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("wanted", "ExecCondition: whether it may start by itself, which one that was put to sleep may not"),
        ("preflight", "ExecStartPre: check what the engine needs"),
        ("ready", "ExecStartPost: wait for the engine, warm it, prove it (reads $MAINPID)"),
        ("drain", "ExecStop: withdraw, and wait for the requests in flight (reads $MAINPID)"),
        ("settle", "ExecStopPost: record the end, wait for the GPU memory"),
    ):
        commands.add_parser(name, help=text).add_argument("engine")
    commands.add_parser(
        "remind", help="tell a balancer again what it was told and has forgotten; changes no lease"
    ).add_argument("engine")
    for name, text in (
        ("preload-preflight", "ExecStartPre of a preload daemon: check what it needs, and what it will read"),
        ("preload-ready", "ExecStartPost: wait until it holds its weights, and record them (reads $MAINPID)"),
        ("preload-settle", "ExecStopPost: record the end, wait for the GPU memory"),
    ):
        commands.add_parser(name, help=text).add_argument("daemon")
    info = commands.add_parser("info", help="print what is seen of the engines, as JSON")
    info.add_argument("engine", nargs="*")
    metrics = commands.add_parser("metrics", help="print what is seen of the engines in the Prometheus text format")
    metrics.add_argument(
        "--textfile", type=os.path.abspath, metavar="FILE", help="write it there instead, whole or not at all"
    )
    metrics.add_argument(
        "--timeout", type=float, default=exposition.TIMEOUT, metavar="SECONDS", help="after which what hangs is unknown"
    )
    change_parser = commands.add_parser("set", help="bring an engine to a state, as the modules do")
    change_parser.add_argument("engine")
    change_parser.add_argument("state", choices=WANTED)
    change_parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS")
    change_parser.add_argument(
        "--mode", choices=["wait", "abort", "keep"], default="wait", help="what becomes of requests at the time-out"
    )
    change_parser.add_argument("--tags", nargs="+", choices=["weights", "kv_cache"], default=[], help="of awake")
    change_parser.add_argument(
        "--owner", default=f"operator-{os.environ.get('SUDO_USER') or os.environ.get('USER', '')}"
    )
    change_parser.add_argument("--reason", default="")
    change_parser.add_argument("--level", type=int, choices=[0, 1, 2], default=1, help="of asleep")
    change_parser.add_argument("--host-copy-mib", type=int, help="of asleep at level 1: what its copy takes")
    change_parser.add_argument(
        "--on-failure", choices=["fail", "stop"], default="fail", help="of asleep: stop the unit to free its memory"
    )
    change_parser.add_argument(
        "--on-mismatch",
        choices=["fail", "restart"],
        default="fail",
        help="of awake: when its answers are not its golden's",
    )
    change_parser.add_argument("--kv-only", action="store_true", help="asleep frees the KV cache alone")
    change_parser.add_argument("--force", action="store_true")
    change_parser.add_argument("--check", action="store_true", help="say what would be done")
    _add_weights(commands)
    _add_golden(commands)
    return parser


def _add_weights(commands: t.Any) -> None:
    parser = commands.add_parser("weights", help="print the manifest of a checkpoint's files, as JSON; record, match")
    parser.add_argument("path", type=os.path.abspath)
    parser.add_argument(
        "--state", choices=weights.STATES, help="record the manifest, or match it with the recorded one"
    )
    parser.add_argument("--method", choices=weights.METHODS, default="", help="default: as recorded, else full")
    parser.add_argument("--user", default="", help="the service user, who must be able to read every file")
    parser.add_argument("--allowed", action="append", default=[], metavar="DIGEST", help="may be repeated")
    parser.add_argument("--allowed-file", default="", metavar="FILE", help="one allowed digest a line")
    parser.add_argument("--allowed-signers", default="", metavar="FILE", help="of ssh-keygen; who may sign that list")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--check", action="store_true", help="say what would be done")


def _add_golden(commands: t.Any) -> None:
    parser = commands.add_parser("golden", help="record what an engine answers, or match it with what was recorded")
    parser.add_argument("engine")
    parser.add_argument("verb", choices=["record", "match"])
    parser.add_argument("--golden", action="append", default=[], metavar="FILE", help="from elsewhere; may be repeated")
    parser.add_argument("--prompts", default="", metavar="FILE", help="a JSON list of what to ask")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--logprobs", type=float, metavar="TOLERANCE", help="difference of log probabilities")
    parser.add_argument("--vectors", type=float, metavar="TOLERANCE", help="difference of vectors, as a share")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS")
    parser.add_argument("--force", action="store_true", help="record anew what the engine does not match")
    parser.add_argument("--check", action="store_true", help="say what would be done")


def _golden(arguments: argparse.Namespace) -> dict[str, t.Any]:
    if arguments.max_tokens is not None and not 0 < arguments.max_tokens <= golden.MOST_TOKENS:
        raise UsageError(f"--max-tokens must be from 1 to {golden.MOST_TOKENS}", entry="option-value")
    wanted = golden_change.Wanted(
        state={"record": "recorded", "match": "matching"}[arguments.verb],
        prompts=_json_file(arguments.prompts, list) if arguments.prompts else (),
        max_tokens=arguments.max_tokens,
        logprobs=arguments.logprobs,
        vectors=arguments.vectors,
        goldens=[_json_file(path, dict) for path in arguments.golden],
        timeout=arguments.timeout,
        force=arguments.force,
    )

    def progress(message: str) -> None:
        _report(message, sys.stderr)

    engine = config.load(arguments.engine)
    return golden_change.bring(engine, wanted, check=arguments.check, report=progress).asdict()


def _json_file(path: str, kind: type) -> t.Any:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}", entry="option-value", next_step="name a JSON file") from exc
    if not isinstance(value, kind):
        raise UsageError(
            f"{path} holds no JSON {'list' if kind is list else 'object'}",
            entry="option-value",
            next_step="correct the file",
        )
    return value


def _weights(arguments: argparse.Namespace) -> dict[str, t.Any]:
    def progress(message: str) -> None:
        _report(message, sys.stderr)  # stdout is for the JSON

    lists = (arguments.allowed, arguments.allowed_file, arguments.allowed_signers)
    if arguments.state:
        return weights.bring(
            arguments.path,
            arguments.state,
            method=arguments.method,
            user=arguments.user,
            timeout=arguments.timeout,
            pinned=lists[0],
            allowed_file=lists[1],
            allowed_signers=lists[2],
            check=arguments.check,
            report=progress,
        )
    manifest = weights.take(
        arguments.path,
        method=arguments.method or "full",
        user=arguments.user,
        timeout=arguments.timeout,
        remember=not arguments.check,
        report=progress,
    )
    weights.allowed(manifest, *lists)
    return manifest.asdict()


def _metrics(arguments: argparse.Namespace) -> None:
    """What could not be looked at is told in the metrics, and is no failure of theirs."""
    if not 0 < arguments.timeout < 3600:
        raise UsageError(f"--timeout must be above 0 and below 3600, not {arguments.timeout:g}", entry="option-value")
    text, complaints = exposition.run(arguments.timeout)
    for complaint in complaints:
        _report(complaint, sys.stderr)
    if arguments.textfile:
        store.write_text(Path(arguments.textfile), text, 0o644)
    else:
        _report(text.rstrip("\n"))


def _report(message: str, stream: t.TextIO | None = None) -> None:
    stream = stream or sys.stdout
    stream.write(f"{message}\n")
    stream.flush()


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command == "info":
        names = arguments.engine or config.known_engines()
        _report(json.dumps({name: observe(config.load(name)).asdict() for name in names}, indent=1))
        return
    if arguments.command == "metrics":
        _metrics(arguments)
        return
    if arguments.command == "weights":
        _report(json.dumps(_weights(arguments), indent=1))
        return
    if arguments.command == "golden":
        _report(json.dumps(_golden(arguments), indent=1, default=str))
        return
    main_pid = int(os.environ.get("MAINPID") or 0)
    if arguments.command.startswith("preload-"):
        daemon = config.load_daemon(arguments.daemon)
        if arguments.command == "preload-preflight":
            preload_doors.preflight(daemon, _report)
        elif arguments.command == "preload-ready":
            preload_doors.ready(daemon, _report, main_pid)
        else:
            preload_doors.settle(daemon, _report)
        return
    engine = config.load(arguments.engine)
    if arguments.command == "wanted":
        doors.wanted(engine)
    elif arguments.command == "preflight":
        doors.preflight(engine, _report)
    elif arguments.command == "ready":
        doors.ready(engine, _report, main_pid)
    elif arguments.command == "drain":
        doors.drain(engine, _report, main_pid)
    elif arguments.command == "settle":
        doors.settle(engine, _report)
    elif arguments.command == "remind":
        doors.remind(engine, _report)
    else:
        request = LeaseRequest(owner=arguments.owner, reason=arguments.reason)
        wish = Wish(
            state=arguments.state,
            lease=request,
            timeout=arguments.timeout,
            mode=arguments.mode,
            force=arguments.force,
            level=arguments.level,
            kv_only=arguments.kv_only,
            host_copy_mib=arguments.host_copy_mib,
            on_failure=arguments.on_failure,
            on_mismatch=arguments.on_mismatch,
            tags=tuple(arguments.tags),
        )
        outcome = change(engine, wish, check=arguments.check, report=_report)
        _report(json.dumps(outcome.asdict(), indent=1, default=str))


def main(argv: t.Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    begun = time.monotonic()
    try:
        _run(arguments)
    except LifecycleError as exc:
        _report(f"vllm-lifecycle: {exc.text}", sys.stderr)
        if isinstance(exc, MissingLibrary):
            _report(exc.import_error, sys.stderr)
        if exc.details:
            details = {**exc.details, "elapsed": round(time.monotonic() - begun, 3)}
            _report(json.dumps(details, default=str), sys.stderr)
        return exc.exit_code
    return 0
