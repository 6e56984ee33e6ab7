# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lifecycle library of baremetal.vllm. Private: it may change in any release.

Ansible ships these files to the host for a module run; the vllm_host role installs the same files there as the
package ``vllm_lifecycle`` for the units' command. So nothing here imports Ansible, and imports are relative.
"""

from __future__ import annotations

VERSION = "0.1.0"
