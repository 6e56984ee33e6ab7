#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_wake
short_description: Wake a sleeping vLLM engine, with the right weights, and admit it again
version_added: 0.1.0
description:
  - Refuses when the memory that the engine gave back is held by another process, and names it.
  - After a sleep at level 2 the weights are gone, although a plain wake would answer 200. Such an engine is woken in
    stages - memory of the weights, reload on every rank, KV cache, prefix cache - and a killed run is gone on with.
  - A process whose sleeps have left more memory behind than its budget allows is restarted instead. So is one that
    M(baremetal.vllm.vllm_sleep) had to stop, under the same lease.
  - Its golden proves it before it is admitted again, see M(baremetal.vllm.vllm_golden), and a completion where none is
    on record. An engine that does not match stays withdrawn, and its lease is kept. A paused, drained engine is not
    asleep, and is left as it is.
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
    details: A prediction from reads alone.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  tags:
    description:
      - The parts to wake, instead of all. V(weights) alone leaves an engine that is V(waking), out of rotation and
        without its KV cache, so that weights can be prepared while another engine still uses that memory.
      - V(kv_cache) is refused before the weights are awake. An engine whose KV cache alone was freed needs only it.
    type: list
    elements: str
    choices: [weights, kv_cache]
  on_mismatch:
    description:
      - What to do when the awake engine does not match its golden, see M(baremetal.vllm.vllm_golden).
      - With V(fail) the task fails; the engine stays withdrawn and its lease is kept.
      - With V(restart) its unit is restarted once, proved again, and admitted if it matches then. RV(recovered_from)
        says what was wrong.
    type: str
    choices: [fail, restart]
    default: fail
  measure:
    description:
      - Sample what the engine holds on each GPU while it wakes, and time a first token once it is proved, which adds
        one short request. What was seen is in RV(measured).
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_golden
  - module: baremetal.vllm.vllm_sleep
  - module: baremetal.vllm.vllm_drain
"""

EXAMPLES = r"""
- name: Wake it in the morning
  baremetal.vllm.vllm_wake:
    engine: chat
    lease:
      owner: night
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
  sample: ["chat: wake it", "chat: prove it by a completion", "chat: admit it at the gate"]
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
  sample: {"state": "asleep", "level": 1, "admission": "closed", "proved": true, "paused": true, "lease": "night"}
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
measured:
  description:
    - With O(measure), C(gpu_peak_mib), by GPU UUID the most MiB that the processes of the unit held in any sample, and
      C(first_token_s), the seconds until the first token of a prompt of C(prompt_tokens) that was not in its cache.
    - A GPU of which a sample gave no number is left out, and C(gpu_peak_mib) where that is so of all.
  returned: when O(measure) is true and the engine was woken
  type: dict
  sample: {"gpu_peak_mib": {"GPU-2f6e": 71930}, "first_token_s": 0.031, "prompt_tokens": 512}
recovered_from:
  description: The mismatch that a restart made good for.
  returned: when O(on_mismatch=restart) restarted the unit
  type: str
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
  sample: gpu-memory-short
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import CHANGE, run_change
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ONE_OR_MORE
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **CHANGE,
            "tags": {"type": "list", "elements": "str", "choices": ["weights", "kv_cache"]},
            "on_mismatch": {"type": "str", "choices": ["fail", "restart"], "default": "fail"},
            "measure": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    run_change(module, "awake", progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
