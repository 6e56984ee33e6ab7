# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a module imports the library from. To be imported before it. Private to this collection.

Ansible sends the library to the host in an archive for each module run, out of which every run would compile it anew.
Role vllm_host has installed the very same files there, compiled; where they are the same, byte by byte, these are
imported.
"""

from __future__ import annotations

import os
import sys
import typing as t
import zipfile
import zipimport

from . import _lifecycle


def _installed(loader: t.Any, sent: str) -> list[str]:
    """The directory of the same library on this host; none when one file differs or this is no module run."""
    if not isinstance(loader, zipimport.zipimporter):
        return []
    there = os.path.join(sys.prefix, "lib", "lifecycle", "vllm_lifecycle")
    here = os.path.relpath(sent, loader.archive).replace(os.sep, "/") + "/"
    try:
        with zipfile.ZipFile(loader.archive) as archive:
            for name in archive.namelist():
                if name.startswith(here):
                    with open(os.path.join(there, name[len(here) :]), "rb") as file:
                        if file.read() != archive.read(name):
                            return []
    except OSError:
        return []
    return [there]


_lifecycle.__path__ = [*_installed(_lifecycle.__spec__.loader, _lifecycle.__path__[0]), *_lifecycle.__path__]
