#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_reload
short_description: Have a running vLLM engine serve the weights that are on disk now
version_added: 0.1.0
description:
  - For new weights at the same path and of the same shapes. The engine is drained, loads them on every rank, forgets
    its prefix cache, is proved and admitted again, all in the same process.
  - Which weights it serves is known by the digest of its checkpoint, see M(baremetal.vllm.vllm_weights). It is taken
    before the drain begins and once more after the load, so files that change meanwhile are found.
  - It is proved by the golden of the new weights, see M(baremetal.vllm.vllm_golden), and by a completion where none is
    on record for them.
  - Where not all ranks load, the engine is restarted instead, which loads the same files.
  - An engine that takes its weights from a preload daemon is refused, since the daemon would lend the old ones still.
author:
  - baremetal.vllm contributors (@baremetal-vllm)
extends_documentation_fragment:
  - baremetal.vllm._common
  - baremetal.vllm._common.attributes
  - baremetal.vllm._common.long
  - baremetal.vllm._common.engines
  - baremetal.vllm._common.change
attributes:
  check_mode:
    support: full
    details: A prediction from reads alone. It hashes the checkpoint, and does not remember what it has hashed.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  mode:
    description:
      - What happens to requests that are still in flight at the time-out.
      - V(wait) fails and leaves them running, with the engine withdrawn.
      - V(abort) cuts them and counts them in RV(requests_cut).
    type: str
    choices: [wait, abort]
    default: wait
seealso:
  - module: baremetal.vllm.vllm_weights
  - module: baremetal.vllm.vllm_engine
"""

EXAMPLES = r"""
- name: Serve the weights that the training job has just written
  baremetal.vllm.vllm_reload:
    engine: chat
    timeout: 1800
    lease:
      owner: training
      reason: checkpoint of step 4000
  vars:
    ansible_python_interpreter: /opt/vllm/control/bin/python
"""

RETURN = r"""
changed:
  description: Whether anything was changed, also by a run that failed later.
  returned: always
  type: bool
actions:
  description: What was done, or in check mode would be done, one sentence a step.
  returned: always
  type: list
  elements: str
  sample: ["chat: load its weights anew on every rank", "chat: prove it by a completion"]
engines:
  description:
    - The result of each engine, by name, with the keys C(changed), C(actions), C(before), C(after), C(elapsed) and
      C(timings); after a failure also C(left).
  returned: always
  type: dict
before:
  description: The state before, for O(engine). Unseen values are null.
  returned: when one engine is named
  type: dict
  sample: {"state": "serving", "level": null, "admission": "open", "proved": true, "paused": false, "lease": null}
after:
  description: The state after, observed anew; in check mode the predicted one.
  returned: when one engine is named
  type: dict
  sample: {"state": "serving", "level": null, "admission": "open", "proved": true, "paused": false, "lease": null}
admission_backend:
  description:
    - Whose word admission is, V(gate), V(haproxy) or V(command); with V(none) the engine alone was asked.
  returned: when one engine is named
  type: str
  sample: gate
elapsed:
  description: Seconds.
  returned: when one engine is named
  type: float
  sample: 5.2
timings:
  description: Seconds by step.
  returned: when one engine is named
  type: dict
  sample: {"wake": 0.4, "prove": 0.1, "admit": 0.01, "await_ready": 0.02}
steps:
  description: Each step in its order, with C(seconds) and, in seconds since the epoch, the time C(at) which it ended.
  returned: when one engine is named, not in check mode
  type: list
  elements: dict
  sample: [{"step": "lease", "seconds": 0.002, "at": 1764460800.113}]
weights:
  description: The digest of the weights that were served before, empty where it was not known, and of those on disk.
  returned: when one engine is named, not in check mode
  type: dict
  sample: {"before": "sha256:5f2c", "after": "sha256:9a01"}
recovered_from:
  description: The failure of the load that was made good by a restart.
  returned: when the engine was restarted for that
  type: str
withdrawn_again:
  description: How often, during a drain, a balancer had to be told again, since a reload or restart had forgotten it.
  returned: when that happened
  type: int
requests_cut:
  description: Requests that O(mode=abort) cut.
  returned: when requests were cut
  type: int
proof:
  description:
    - What proved the engine. C(by) is V(golden), with its C(key), what it was C(compared_by), how many C(positions)
      were compared, and the largest C(distance); or V(completion), with C(why) it was no golden.
  returned: when the engine was proved
  type: dict
  sample:
    by: golden
    key: base-4f1c0a9b3d2e5f60718a
    compared_by: logprobs
    positions: 48
    distance: 0.0
out_of_service:
  description:
    - What the released lease had held, since when (seconds since the epoch), for how many seconds, with the seconds of
      every step under it (C(timings), and C(steps) with the end of each), what it holds on each GPU at the end
      (C(gpu_mib)), and the record of the last proved start.
  returned: when a lease was released
  type: dict
left:
  description: What stood in the way, by engine.
  returned: on failure
  type: dict
  sample: {"chat": {"running": 2, "waiting": 0, "sessions": 2}}
next_step:
  description: What to do about the failure.
  returned: on failure
  type: str
runbook:
  description: Heading of the entry in C(docs/runbook.md) that explains the failure. The message ends with it, too.
  returned: on failure
  type: str
  sample: weights-changing
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import CHANGE, run_change
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ONE_OR_MORE
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={**CHANGE, "mode": {"type": "str", "choices": ["wait", "abort"], "default": "wait"}},
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    run_change(module, "reloaded", progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
