"""Prints a GPU report as a short table: table.py gpu-report.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROW = "{:58} {:>8} {:>8} {:>8} {:>8}  {}"


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main(path: str) -> None:
    report = json.loads(Path(path).read_text())
    print(ROW.format("transition", "task s", "engine s", "MiB from", "MiB to", "verdict"))
    for one in report["transitions"]:
        numbers = (one["task_seconds"], one["engine_seconds"], one["gpu_mib_before"], one["gpu_mib_after"])
        print(ROW.format(one["transition"][:58], *map(cell, numbers), one["verdict"]))


if __name__ == "__main__":
    main(sys.argv[1])
