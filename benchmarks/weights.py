# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long the manifest of a checkpoint takes: in full, by sample, and once more, beside sha256sum on the same files.

    .venv/bin/python benchmarks/weights.py                 a checkpoint of 13 GiB in build/, made and removed
    .venv/bin/python benchmarks/weights.py --model /srv/models/base

Every run but the second ones begins with none of the files in the page cache. sha256sum gets the priority that the
product gives itself, so that other work on the machine slows both alike; the time on a CPU says what each would take
without it. Writes build/weights-report.json; sizes in GiB, times in seconds, rates in GiB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import store, weights

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build/weights-report.json"
GIB = 2**30
TENSORS = 109  # of a shard; a model of 7 billion parameters has 435 in all
IDLE = ["chrt", "--idle", "0"]


def make(folder: Path, gib: float, shards: int) -> None:
    """Safetensors files of random bytes, written out to the disk."""
    block = os.urandom(64 * 2**20)
    size = int(gib * GIB / shards / TENSORS)
    for number in range(1, shards + 1):
        header = {
            f"layers.{number}.{index}.weight": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [index * size, (index + 1) * size],
            }
            for index in range(TENSORS)
        }
        text = json.dumps(header).encode()
        with open(folder / f"model-{number:05}-of-{shards:05}.safetensors", "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            left = size * TENSORS
            while left:
                left -= stream.write(block[:left])
            stream.flush()
            os.fsync(stream.fileno())
    (folder / "config.json").write_text("{}")


def forget(files: t.Iterable[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Cost(t.NamedTuple):
    wall: float
    cpu: float


def on_cpu() -> float:
    """Seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measure(files: list[Path], work: t.Callable[[], t.Any], cold: bool = True) -> Cost:
    if cold:
        forget(files)
    begun, used = time.monotonic(), on_cpu()
    work()
    return Cost(round(time.monotonic() - begun, 4), round(on_cpu() - used, 2))


def run(command: list[str], **options: t.Any) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)


def compare(model: Path) -> dict[str, t.Any]:
    files = sorted(path for path in model.rglob("*") if path.is_file())
    names = [str(path) for path in files]
    size = sum(path.stat().st_size for path in files)
    cores = len(os.sched_getaffinity(0))
    listed = "\0".join(names).encode()

    def take(method: str) -> weights.Manifest:
        return weights.take(str(model), method=method, report=lambda message: print(message, file=sys.stderr))

    costs: dict[str, Cost] = {}
    costs["cat"] = measure(files, lambda: run([*IDLE, "cat", *names]))
    costs["sha256sum"] = measure(files, lambda: run([*IDLE, "sha256sum", *names]))
    every_core = [*IDLE, "xargs", "-0", "-n1", f"-P{cores}", "sha256sum"]
    costs["sha256sum_all_cores"] = measure(files, lambda: run(every_core, input=listed))
    costs["full"] = measure(files, lambda: take("full"))
    costs["full_again"] = measure(files, lambda: take("full"), cold=False)
    costs["sample"] = measure(files, lambda: take("sample"))
    costs["sample_again"] = measure(files, lambda: take("sample"), cold=False)
    if take("full").hashed or take("sample").hashed:
        raise SystemExit("a run after the second one still read content")
    seconds = {name: cost.wall for name, cost in costs.items()}
    return {
        "schema": "baremetal.vllm/weights",
        "version": 1,
        "gib": round(size / GIB, 3),
        "files": len(files),
        "cores": cores,
        "load_average": os.getloadavg()[0],
        "seconds": seconds,
        "cpu_seconds": {name: cost.cpu for name, cost in costs.items()},
        "gib_per_s": {name: round(size / GIB / seconds[name], 3) for name in seconds if not name.endswith("again")},
        "ratios": {
            "full:full_again": round(seconds["full"] / seconds["full_again"]),
            "full:sample": round(seconds["full"] / seconds["sample"], 1),
            "sha256sum:full": round(seconds["sha256sum"] / seconds["full"], 2),
            "sha256sum_all_cores:full": round(seconds["sha256sum_all_cores"] / seconds["full"], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint that is there")
    parser.add_argument("--gib", type=float, default=13, help="size of the one that is made")
    parser.add_argument("--shards", type=int, default=4)
    arguments = parser.parse_args()
    REPORT.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="weights-", dir=REPORT.parent))
        stack.callback(shutil.rmtree, place)
        os.environ[store.ROOT_VARIABLE] = str(place / "host")  # nothing is remembered yet
        model = arguments.model
        if model is None:
            model = place / "model"
            model.mkdir()
            make(model, arguments.gib, arguments.shards)
        report = compare(model.resolve())
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
