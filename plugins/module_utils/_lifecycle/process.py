# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs another program. Always a list of arguments, never a shell, and always with a time-out."""

from __future__ import annotations

import subprocess
import typing as t

Done = subprocess.CompletedProcess
TimeoutExpired = subprocess.TimeoutExpired


def run(arguments: list[str], timeout: float, **options: t.Any) -> Done[str]:
    """The finished program, whatever its exit status.

    :raises OSError: it cannot be started.
    :raises TimeoutExpired: it was ended after ``timeout`` seconds.
    """
    # AnsibleModule.run_command is not there for the units, which use the same code.
    return subprocess.run(  # pylint: disable=ansible-bad-function
        arguments, capture_output=True, text=True, errors="replace", timeout=timeout, check=False, **options
    )
