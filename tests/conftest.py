# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from ansible.plugins.loader import init_plugin_loader

# Before anything of the collection is imported, in whatever order tests are named.
init_plugin_loader()
