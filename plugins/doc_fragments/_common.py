# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Documentation that the modules share. Private to this collection."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
requirements:
  - httpx on the managed host, in the interpreter that runs the module. The role P(baremetal.vllm.vllm_host#role) makes
    a virtual environment with it; use V(/opt/vllm/control/bin/python) as C(ansible_python_interpreter).
"""

    ATTRIBUTES = r"""
options: {}
attributes:
  check_mode:
    description: Can run in check mode and predict the result without changing anything.
  diff_mode:
    description: Returns what has changed, or would change in check mode, in diff mode.
  idempotent:
    description: A second run with the same options changes nothing.
  action_group:
    description: Use C(group/baremetal.vllm.vllm) in C(module_defaults) to set options of all these modules.
    support: full
    membership:
      - baremetal.vllm.vllm
"""

    LONG = r"""
options: {}
attributes:
  action:
    description: Has an action plugin, which shows how far a task is that takes long. What is done is done on the host.
    support: full
  async:
    description: Can be used with the C(async) keyword. Ansible then looks at the task itself, and nothing is shown.
    support: full
notes:
  - What is not done after the seconds in the variable C(vllm_progress), 10 by default, goes on in the background of the
    host and is looked at from time to time, and a line says how far it is. The result is the same. With
    C(vllm_progress=false) the module is one call, however long that takes.
"""

    ENGINES = r"""
options:
  engine:
    description:
      - The name of one engine of the host.
    type: str
  engines:
    description:
      - The names of several engines of the host, handled side by side.
    type: list
    elements: str
"""

    CHANGE = r"""
options:
  timeout:
    description:
      - Seconds for the whole change of each engine. Running out is a failure that names what is left.
    type: float
    default: 900.0
  lease:
    description:
      - Who holds the engine out of service. It is written on the host before the first change, so that a killed run can
        be told from a wish, and the next run goes on with it.
    type: dict
    suboptions:
      owner:
        description:
          - Who holds the lease. The same owner goes on with its own lease; another one's is respected until it
            expires.
        type: str
        default: ansible
      reason:
        description:
          - Why, in words, for whoever reads M(baremetal.vllm.vllm_info).
        type: str
        default: ""
      ttl:
        description:
          - Seconds after which others may take the lease over.
        type: float
        default: 14400.0
  run:
    description:
      - Names a run over many hosts. It is kept with the lease and with the last transition.
    type: str
    default: ""
  force:
    description:
      - Go on although someone else holds the lease.
      - Also stop an engine whose balancer gives no answer, so that requests it still sends may be lost.
    type: bool
    default: false
"""
