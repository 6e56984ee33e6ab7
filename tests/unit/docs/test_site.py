# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The site of the documentation: how links are bent to it, and that a link which leads nowhere is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
where = importlib.util.spec_from_file_location("tool_docs", ROOT / "tools/docs.py")
docs = importlib.util.module_from_spec(where)
where.loader.exec_module(docs)

GUIDE, ROLE = "docs/sleep.md", "roles/vllm_gate/README.md"
LINKS = {
    "a guide goes by its title": (GUIDE, "preload.md", "preload.md", "[](preload.md)"),
    "the anchor stays": (GUIDE, "there", "playbooks.md#switch", "[there](playbooks.md#switch)"),
    "within the page": (GUIDE, "below", "#words", "[below](#words)"),
    "from a guide to a role": (GUIDE, "role", "../roles/vllm_gate/README.md", "[role](roles/vllm_gate/README.md)"),
    "from a role to a guide": (ROLE, "groups.md", "../../docs/groups.md", "[](../../groups.md)"),
    "from role to role": (ROLE, "router", "../vllm_router/README.md", "[router](../vllm_router/README.md)"),
    "a file of a role": (ROLE, "all", "meta/argument_specs.yml", "[all](meta/argument_specs.yml)"),
    "a file beside the guides": (GUIDE, "one", "examples/nginx.conf", "[one](examples/nginx.conf)"),
    "a folder": (GUIDE, "awx", "../awx", "awx"),
    "what the site has not": (GUIDE, "the play", "../playbooks/sleep.yml", "the play"),
    "elsewhere": (GUIDE, "vLLM", "https://docs.vllm.ai/", "[vLLM](https://docs.vllm.ai/)"),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_are_bent(case):
    page, text, target, wanted = LINKS[case]
    original = ROOT / page
    assert docs.bend(text, target, original, docs.place(original)) == wanted


def test_lost_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "SITE", tmp_path)
    (tmp_path / "roles").mkdir()
    (tmp_path / "a b.html").write_text('<h1 id="top">x</h1>')
    (tmp_path / "index.html").write_text(
        '<p id="here"><a href="#here">1</a><a href="a%20b.html#top">2</a><a href="https://docs.vllm.ai/x#y">3</a>'
        '<a href="roles/none.html">4</a><a href="a%20b.html#bottom">5</a><a href="#there">6</a><img src="none.png">'
    )
    (tmp_path / "roles/r.html").write_text('<a href="../index.html#here">1</a><a href="index.html">2</a>')
    found = ["#there", "a%20b.html#bottom", "none.png", "roles/none.html"]
    assert sorted(docs.lost()) == [*(f"index.html: {link}" for link in found), "roles/r.html: index.html"]
