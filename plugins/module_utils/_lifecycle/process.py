# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs another program. Always a list of arguments, never a shell, and always with a time-out."""

from __future__ import annotations

import os
import signal
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


def run_alone(arguments: list[str], timeout: float, **options: t.Any) -> Done[str]:
    """The same for somebody else's program: at the time-out its children end, too, which would keep the pipes open."""
    process = subprocess.Popen(  # pylint: disable=ansible-bad-function
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Done(arguments, process.returncode, out, err)
