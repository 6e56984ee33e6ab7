# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make build/docs/html: the guides, the pages of the roles, and what antsibull-docs writes of every plugin and role.

The Markdown files are written for readers of the repository. Sphinx reads copies of them, in one tree, with menus added
and links bent to that tree. A warning of antsibull-docs or Sphinx, and a link that leads nowhere, end the build.
"""

from __future__ import annotations

import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "docs"
SOURCE = BUILD / "source"
SITE = BUILD / "html"
KINDS = {"module": "Modules", "filter": "Filters"}


def run(*argv: str) -> None:
    """Quiet while it works; the whole output when it fails."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(BUILD), "NO_COLOR": "1"}  # antsibull-docs logs to its home
    done = subprocess.run(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}docs: `{' '.join(argv)}` ended with {done.returncode}")


def place(original: pathlib.Path) -> pathlib.Path | None:
    """Where the tree has this file of the repository, if it does. docs/ is the top of it."""
    below = original.relative_to(ROOT)
    if original.is_dir() or below.parts[0] not in ("docs", "roles"):
        return None
    return SOURCE / (below.relative_to("docs") if below.parts[0] == "docs" else below)


def bend(text: str, target: str, original: pathlib.Path, here: pathlib.Path) -> str:
    """A link of a page, for its copy."""
    path, sharp, anchor = target.partition("#")
    if path and not re.match(r"[a-z]+:", target):
        there = place((original.parent / path).resolve())
        if there is None:  # the repository has it, this tree has not
            return text
        target = os.path.relpath(there, here.parent) + sharp + anchor
        text = "" if text.endswith(".md") else text  # a page goes by its title
    return f"[{text}]({target})"


def copy_page(original: pathlib.Path, here: pathlib.Path) -> None:
    link = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
    here.write_text(link.sub(lambda match: bend(match[1], match[2], original, here), original.read_text()))


def menu(entries: list[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])


def add(path: pathlib.Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def reference() -> None:
    """What antsibull-docs writes, and a page for each kind of plugin that leads to it."""
    folder = SOURCE / "reference"
    folder.mkdir(mode=0o755)
    run("antsibull-docs", "collection", "--use-current", "--fail-on-error", "--squash-hierarchy", "--no-breadcrumbs",
        "--dest-dir", str(folder), "baremetal.vllm")  # fmt: skip
    for name in ("index", "environment_variables"):  # the pages below are in their place; plugins read no environment
        (folder / f"{name}.rst").unlink()
    titles = {}
    for path in sorted(folder.glob("*.rst")):
        # Furo shows the contents of each page beside it.
        text = re.sub(r"(?m)^\.\. contents::\n(?: +:.*\n)+", "", path.read_text())
        path.write_text(text.replace(":orphan:", "", 1))
        name, short = re.findall(r"(?m)^baremetal\.vllm\.(\w+) \w+ -- (.+)\n\++$", text)[0]
        titles[path.stem] = (name, short)
    for kind, title in KINDS.items():
        pages = {stem: both for stem, both in titles.items() if stem.endswith(f"_{kind}")}
        lines = [f"- [{name}]({stem}.rst): {short}" for stem, (name, short) in pages.items()]
        entries = [f"{name} <{stem}>" for stem, (name, _short) in pages.items()]
        (folder / f"{kind}s.md").write_text("\n".join([f"# {title}", "", *lines, menu(entries)]))
    for stem in titles:
        if stem.endswith("_role"):
            role = stem.removesuffix("_role")
            below = f"\n## All variables\n\n[Reference of {role}](../../reference/{stem}.rst)\n"
            add(SOURCE / "roles" / role / "README.md", below + menu([f"Variables <../../reference/{stem}>"]))


def prepare() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("site"))
    shutil.copytree(ROOT / "roles", SOURCE / "roles")
    for original in [*ROOT.glob("docs/*.md"), *ROOT.glob("roles/*/README.md")]:
        if here := place(original):
            copy_page(original, here)
    reference()
    index = SOURCE / "index.md"
    guides = re.findall(r"(?m)^\d+\. \[\]\((\w+)\.md\)", index.read_text())
    roles = re.findall(r"\]\((roles/\w+/README)\.md\)", index.read_text())
    menus = menu(guides, "Guides") + menu(roles, "Roles") + menu([f"reference/{kind}s" for kind in KINDS], "Reference")
    add(index, menus)


class Page(html.parser.HTMLParser):
    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.names.add(value)
            elif tag in ("a", "img", "link", "script") and name in ("href", "src") and value:
                self.links.add(value)


def lost() -> list[str]:
    """Links of the site to what it does not have."""
    pages = {path: Page(path) for path in SITE.rglob("*.html")}
    found = []
    for path, one in pages.items():
        for link in sorted(one.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].names):
                found.append(f"{path.relative_to(SITE)}: {link}")
    return found


def main() -> int:
    prepare()
    run("sphinx-build", "-b", "html", "-q", "-W", "--keep-going", "-j", "2", "-c", "docs/site",
        "-d", str(BUILD / "doctrees"), str(SOURCE), str(SITE))  # fmt: skip
    dead = lost()
    for line in dead:
        print(f"docs: a link leads nowhere: {line}", file=sys.stderr)
    if not dead:
        print(f"docs: {len(list(SITE.rglob('*.html')))} pages, begin at {SITE / 'index.html'}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
