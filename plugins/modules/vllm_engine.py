#!/usr/bin/python

# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_engine
short_description: Start, stop or restart the unit of a vLLM engine, with proof
version_added: 0.1.0
description:
  - An engine that serves is drained before it is stopped. A start ends when the unit is active, which for the units of
    this collection means warmed and proved ready; then it is proved once more, by its golden where one is on record
    (M(baremetal.vllm.vllm_golden)) and else by a completion.
  - An engine that this module itself took out of rotation is admitted again after the start. One that was drained on
    purpose, with M(baremetal.vllm.vllm_drain), stays drained.
  - The start of a headless engine of a group ends when its process runs. Its lease stays until its head is proved, and
    M(baremetal.vllm.vllm_drain) releases it.
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
    details: A prediction from reads alone. Whether the start will succeed cannot be known.
  diff_mode:
    support: full
  idempotent:
    support: partial
    details: O(state=restarted) restarts each time, unless O(run) names a run that has restarted this process already.
options:
  state:
    description:
      - The wanted state of the unit.
      - V(rolled_back) puts the last configuration in place that was proved and is another than the one on disk, with
        its runtime, and starts the engine with it. Once for each O(run), which it needs. Of a group, all engines have
        to go back, as playbook C(rolling_upgrade) does it.
    type: str
    choices: [started, stopped, restarted, rolled_back]
    required: true
  mode:
    description:
      - What happens to requests that are still in flight at the time-out.
      - V(wait) fails and leaves them running, with the engine withdrawn.
      - V(abort) cuts them and counts them in RV(requests_cut).
    type: str
    choices: [wait, abort]
    default: wait
  on_failure:
    description:
      - What happens when the engine does not start.
      - V(fail) leaves it as it is, out of rotation.
      - V(rollback) goes back to the configuration that was proved last, as with O(state=rolled_back), and proves it.
        The task has failed all the same, since what was asked for does not run; RV(went_back_to) tells what does.
    type: str
    choices: [fail, rollback]
    default: fail
  min_speed_ratio:
    description:
      - The share of the speed with the configuration before that a start has to reach, such as V(0.7). Less is a
        failure of the start, see O(on_failure). V(0) asks for none.
      - Each start is timed with its warm-up. Speeds are compared where both starts had the same one.
    type: float
    default: 0.0
  measure:
    description:
      - Sample what the engine holds on each GPU while it starts, and time a first token once it is proved, which adds
        one short request. What was seen is in RV(measured).
    type: bool
    default: false
seealso:
  - module: baremetal.vllm.vllm_drain
"""

EXAMPLES = r"""
- name: Restart two engines of a host once in this run, however often the play is started
  baremetal.vllm.vllm_engine:
    engines: [chat, code]
    state: restarted
    run: "{{ run_id }}"
    timeout: 1800
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
  sample: ["chat: stop the unit", "chat: start the unit and wait until it is proved ready"]
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
  sample: {"state": "drained", "level": null, "admission": "closed", "proved": true, "paused": true, "lease": "ansible"}
after:
  description: The state after, observed anew; in check mode the predicted one.
  returned: when one engine is named
  type: dict
  sample: {"state": "withdrawn", "level": null, "admission": "closed", "proved": true, "paused": false, "lease": "me"}
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
  sample: {"stop": 4.1, "start": 61.0, "prove": 0.1}
steps:
  description: Each step in its order, with C(seconds) and, in seconds since the epoch, the time C(at) which it ended.
  returned: when one engine is named, not in check mode
  type: list
  elements: dict
  sample: [{"step": "lease", "seconds": 0.002, "at": 1764460800.113}]
went_back_to:
  description: The generation that the engine went back to, with the digest of its configuration and its runtime.
  returned: when it went back
  type: dict
  sample: {"name": "proved", "config_digest": "9c56", "runtime_version": "0.32.0"}
withdrawn_again:
  description: How often, during a drain, a balancer had to be told again, since a reload or restart had forgotten it.
  returned: when that happened
  type: int
speed:
  description:
    - What was compared for O(min_speed_ratio), C(tokens_per_s) and C(before), in tokens a second; or C(why) nothing
      was.
  returned: when the engine was started with O(min_speed_ratio)
  type: dict
  sample: {"tokens_per_s": 181.0, "before": 176.4}
requests_cut:
  description: Requests that O(mode=abort) cut.
  returned: when requests were cut
  type: int
started:
  description:
    - The record of the start, with C(main_pid), when its process C(began), C(boot_s) until it served, C(warm_s) for its
      warm-up and the passes by which its speed is taken, and C(speed) with the C(tokens_per_s) of the warmed engine.
    - C(boot) says what C(boot_s) consisted of, as far as its log says so - C(import), C(load), C(compile), C(profile)
      (with the capture of graphs) and C(serve), in seconds.
  returned: when the unit was started
  type: dict
  sample: {"main_pid": 812, "boot_s": 58.2, "warm_s": 1.1}
measured:
  description:
    - With O(measure), C(gpu_peak_mib), by GPU UUID the most MiB that the processes of the unit held in any sample, and
      C(first_token_s), the seconds until the first token of a prompt of C(prompt_tokens) that was not in its cache.
    - A GPU of which a sample gave no number is left out, and C(gpu_peak_mib) where that is so of all.
  returned: when O(measure) is true and the engine was started
  type: dict
  sample: {"gpu_peak_mib": {"GPU-2f6e": 71930}, "first_token_s": 0.031, "prompt_tokens": 512}
stop_result:
  description: The result that systemd gives for the stop, such as V(success) or V(timeout).
  returned: when the unit was stopped
  type: str
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
  sample: unit-not-started
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.baremetal.vllm.plugins.module_utils._change import CHANGE, run_change
from ansible_collections.baremetal.vllm.plugins.module_utils._glue import ONE_OR_MORE, refuse_option
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import aside
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.aside import Progress


def work(progress: Progress) -> None:
    module = AnsibleModule(
        argument_spec={
            **CHANGE,
            "state": {"type": "str", "choices": ["started", "stopped", "restarted", "rolled_back"], "required": True},
            "mode": {"type": "str", "choices": ["wait", "abort"], "default": "wait"},
            "on_failure": {"type": "str", "choices": ["fail", "rollback"], "default": "fail"},
            "min_speed_ratio": {"type": "float", "default": 0.0},
            "measure": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
        **ONE_OR_MORE,
    )
    if module.params["state"] == "rolled_back" and not module.params["run"]:
        refuse_option(module, "state rolled_back needs run, a name for this change: it is made once")
    if not 0 <= module.params["min_speed_ratio"] < 10:
        refuse_option(module, "min_speed_ratio is a share, from 0 to 10")
    run_change(module, module.params["state"], progress)


def main() -> None:
    aside.run(work)


if __name__ == "__main__":
    main()
