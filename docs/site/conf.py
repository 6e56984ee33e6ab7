# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How Sphinx makes the site; tools/docs.py prepares what it reads. Nothing is fetched, by the build or by the pages."""

from __future__ import annotations

import pathlib
import re

from docutils import nodes
from pygments.lexers.special import TextLexer

GALAXY = pathlib.Path(__file__).parents[2] / "galaxy.yml"
# What antsibull-docs refers to in Ansible's own documentation.
ANSIBLE = {
    "action_plugins": "https://docs.ansible.com/ansible-core/devel/plugins/action.html",
    "common_return_values": "https://docs.ansible.com/ansible-core/devel/reference_appendices/common_return_values.html",
}

project = "baremetal.vllm"
release = re.search(r"^version: (.+)$", GALAXY.read_text(), re.M)[1]
author = "baremetal.vllm contributors"
extensions = ["myst_parser", "sphinx_antsibull_ext"]
nitpicky = True  # a reference that leads nowhere is a warning, and warnings end the build
exclude_patterns = ["roles/*/templates"]
highlight_language = "text"
myst_heading_anchors = 3  # as GitHub makes them, so a link is right in both places
html_theme = "furo"
html_title = f"baremetal.vllm {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def elsewhere(_app, _env, node, contnode):
    if node["reftarget"] not in ANSIBLE:
        return None
    return nodes.reference("", "", contnode, internal=False, refuri=ANSIBLE[node["reftarget"]])


def setup(app):
    app.add_lexer("haproxy", TextLexer)  # Pygments has none, and GitHub needs the word
    app.connect("missing-reference", elsewhere)
