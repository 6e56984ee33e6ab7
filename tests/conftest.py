# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

try:
    from ansible.plugins.loader import init_plugin_loader
except ImportError:
    pass  # `ansible-test units` gives the tests of modules no more of Ansible than a host has, and a loader of its own
else:
    # Before anything of the collection is imported, in whatever order tests are named.
    init_plugin_loader()
