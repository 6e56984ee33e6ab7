# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runtimes that are broken: 0.32.0 by links, under another version and with a command of its own.

To role vllm_runtime they are installed: the stamp and the packages are those of the runtime that they lead to.
"""

from __future__ import annotations

REAL = "/opt/vllm/runtimes/0.32.0"
# Loaded by vLLM as the lab's logits processor, instead of the lab's own.
GARBAGE = """
import os, time
from vllm.v1.sample.logits_processor import LogitsProcessor
class Pace(LogitsProcessor):
    def __init__(self, *_args):
        self.seconds = float(os.environ.get("PACE_SECONDS", "0.015"))
    def is_argmax_invariant(self):
        return False
    def update_state(self, _batch_update):
        pass
    def apply(self, logits):
        time.sleep(self.seconds)
        return logits.roll(1, -1)
"""
COMMANDS = {
    "crash": 'echo "RuntimeError: operator torch.ops._C.rms_norm does not exist" >&2; exit 1',
    "garbage": f'exec env PYTHONPATH=$(dirname "$0")/../garbage {REAL}/bin/vllm "$@"',
    # Starts, is healthy, and gives no token.
    "hang": f'exec env PACE_SECONDS=3600 {REAL}/bin/vllm "$@"',
    "slow": f'exec env PACE_SECONDS=0.5 {REAL}/bin/vllm "$@"',
}


def make(fleet, version: str, kind: str) -> None:
    """On every host, as an installation is."""
    home = f"/opt/vllm/runtimes/{version}"
    script = f"""
set -e
rm -rf {home}; mkdir -p {home}/bin {home}/garbage
ln -s {REAL}/lib {home}/lib
cp -a {REAL}/pyvenv.cfg {home}/
for one in {REAL}/bin/*; do ln -s "$one" {home}/bin/; done
rm {home}/bin/vllm {home}/bin/python; cp -a {REAL}/bin/python {home}/bin/python
cat > {home}/bin/vllm <<'END'
#!/bin/sh
{COMMANDS[kind]}
END
chmod 755 {home}/bin/vllm
cat > {home}/garbage/pace.py <<'END'
{GARBAGE}
END
sed 's/"version": "0.32.0"/"version": "{version}"/' {REAL}/runtime.json > {home}/runtime.json
"""
    for host in fleet.engines:
        fleet.ssh(host, script)
