# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documentation names what there is: links, variables, playbooks, plugins, files, commands and their options."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.exposition import FAMILIES, PREFIX

ROOT = Path(__file__).resolve().parents[3]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
ROLES = sorted(path.parents[1] for path in ROOT.glob("roles/*/tasks/main.yml"))
PAGES = [*GUIDES, ROOT / "README.md", *(role / "README.md" for role in ROLES)]
FLEET = ROOT / "docs/examples/fleet"
# Folders of the checkout that a path in the documentation may begin with. What is below build/ is made by commands.
FOLDERS = "awx|benchmarks|changelogs|docs|examples|meta|molecule|playbooks|plugins|requirements|roles|tests|tools"
# Words that begin like a variable of the collection and are none.
NOT_OURS = {
    "vllm_lifecycle",  # the package that role vllm_host installs
}
# Collections that no index has, so a play that uses them cannot be loaded here; tests/unit/awx looks at awx_apply.yml.
ELSEWHERE = re.compile(r"\b(awx\.awx|infra\.aap_configuration)\.")
PARSERS = {
    "ansible": "ansible.cli.adhoc.AdHocCLI",
    "ansible-playbook": "ansible.cli.playbook.PlaybookCLI",
    "ansible-galaxy": "ansible.cli.galaxy.GalaxyCLI",
    "ansible-vault": "ansible.cli.vault.VaultCLI",
    "ansible-doc": "ansible.cli.doc.DocCLI",
}
PARSE = """
import importlib, json, sys
for argv in json.load(sys.stdin):
    module, _dot, name = argv.pop(0).rpartition(".")
    cli = getattr(importlib.import_module(module), name)(argv)
    cli.init_parser()
    cli.parser.parse_args(argv[1:])
"""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fenced(page: Path) -> list[Block]:
    found = []
    language, begin, lines = None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if language is None and line.startswith("```"):
            language, begin, lines = line[3:].strip(), number, []
        elif language is not None and line == "```":
            found.append(Block(str(page.relative_to(ROOT)), begin, language, "\n".join(lines) + "\n"))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{page}: the block of line {begin} has no end"
    return found


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text())


BLOCKS = [block for page in PAGES for block in fenced(page)]
YAML = [block for block in BLOCKS if block.language == "yaml"]
# Of a console block, what is typed.
SHELL = [block for block in BLOCKS if block.language == "sh"] + [
    Block(
        block.page, block.line, "sh", "".join(f"{line[2:]}\n" for line in block.text.splitlines() if line[:2] == "$ ")
    )
    for block in BLOCKS
    if block.language == "console"
]


# What is typed, shown in the middle of a sentence.
INLINE = [
    Block(str(page.relative_to(ROOT)), 0, "sh", f"{typed}\n")
    for page in PAGES
    for typed in re.findall(r"`(ansible(?:-playbook|-doc|-galaxy|-vault)? [^`\n…]+)`", prose(page))
]


def spans(page: Path) -> list[str]:
    """What stands in backticks, and the commands of the page."""
    here = str(page.relative_to(ROOT))
    return re.findall(r"`([^`\n]+)`", prose(page)) + [block.text for block in SHELL if block.page == here]


def commands() -> list[tuple[Block, list[str]]]:
    """Every simple command of the shell blocks, as words. A substitution stands as one word, and is a command too."""
    found = []
    for block in [*SHELL, *INLINE]:
        text = block.text.replace("\\\n", " ")
        inner = re.findall(r"\$\(([^()]+)\)", text)
        text = re.sub(r"\$\([^()]+\)", "SUBSTITUTED", text)
        for line in [*text.splitlines(), *inner]:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="();|&<>")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            one: list[str] = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set("();|&<>"):
                    if one:
                        found.append((block, one))
                    one = []
                else:
                    one.append(word)
    return found


COMMANDS = commands()


def called(*programs: str) -> list[tuple[Block, list[str]]]:
    return [(block, words) for block, words in COMMANDS if Path(words[0]).name in programs]


def specification(path: Path) -> dict:
    return yaml.safe_load(path.read_text())["argument_specs"]["main"].get("options", {})


def names_of(options: dict) -> set[str]:
    found = set(options)
    for option in options.values():
        found |= names_of(option.get("options") or {})
    return found


ROLE_VARIABLES = {name for role in ROLES for name in names_of(specification(role / "meta/argument_specs.yml"))}
PLAYBOOKS = {path.stem for path in ROOT.glob("playbooks/*.yml") if not path.name.endswith(".meta.yml")}
PLUGINS = {path.stem for path in [*ROOT.glob("plugins/modules/*.py"), *ROOT.glob("plugins/filter/vllm_*.yml")]}


def known_names() -> set[str]:
    found = {f"{PREFIX}{family}" for family in FAMILIES} | ROLE_VARIABLES | PLUGINS | {role.name for role in ROLES}
    for path in [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("awx/**/*.yml")]:
        found |= set(re.findall(r"\bvllm_[a-z0-9_]+", path.read_text()))
    for path in ROOT.glob("plugins/plugin_utils/*.py"):
        found |= set(re.findall(r'task_vars\.get\("(vllm_[a-z0-9_]+)"', path.read_text()))  # of action plugins
    for path in ROOT.glob("roles/*/tasks/*.yml"):
        text = path.read_text()
        found |= set(re.findall(r"(?m)^\s+(vllm_[a-z0-9_]+):", text))  # facts that a role leaves behind
        found |= {tag for tags in re.findall(r"tags: \[(.*?)\]", text) for tag in tags.split(", ")}
    return found


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"(?m)^#+ +(.+?) *$", prose(page))
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "").lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _sharp, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target}: {sorted(anchors(there))}"


def test_the_index_leads_to_every_guide():
    linked = set(re.findall(r"\]\(([^)\s#]+)", prose(ROOT / "docs/index.md")))
    assert {page.name for page in GUIDES} - {"index.md"} <= linked
    assert {f"../roles/{role.name}/README.md" for role in ROLES} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_exist(page):
    text = re.sub(r"\bvllm_[a-z0-9_]+[*…]", "", page.read_text())  # the beginning of several names
    named = set(re.findall(r"(?<![\w/.-])vllm_[a-z0-9_]+\b", text))
    assert named - known_names() - NOT_OURS == set()


def test_the_example_inventory_sets_variables_of_roles():
    for path in FLEET.rglob("group_vars/**/*.yml"):
        named = {name for name in yaml.safe_load(path.read_text()) if not name.startswith("ansible_")}
        assert named <= ROLE_VARIABLES, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_named_of_the_collection_exists(page):
    known = PLAYBOOKS | PLUGINS | {role.name for role in ROLES}
    named = set(re.findall(r"\bbaremetal\.vllm\.([a-z0-9_]+)", page.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page):
    for span in spans(page):
        for path in re.findall(rf"(?<![\w/.$\"-])(?:{FOLDERS})/[\w./*@-]*", span):
            wanted = path.rstrip("./")
            assert any(list(base.glob(wanted)) for base in (ROOT, page.parent)), f"{path} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = {word for span in spans(page) for word in re.findall(r"(?m)(?:^|[;&] *)make +([a-z][a-z-]*)", span)}
    assert named <= targets


def test_playbooks_are_headings_of_their_page():
    heads = set(re.findall(r"(?m)^## +(\w+)$", prose(ROOT / "docs/playbooks.md")))
    assert len(heads) > 5
    assert heads <= PLAYBOOKS


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_parses(block):
    assert yaml.safe_load(block.text) is not None


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_parses(block):
    assert block.text.strip()
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def playbook_of(words: list[str]) -> list[str]:
    """The playbooks that a command names, as files."""
    found = []
    for word in words[1:]:
        if word.startswith("baremetal.vllm."):
            found.append(f"playbooks/{word.rpartition('.')[2]}.yml")
        elif re.fullmatch(r"[\w/]+\.yml", word) and words[words.index(word) - 1] not in ("-i", "--inventory"):
            found.append(word)
    return found


def is_shown(block: Block, book: str) -> bool:
    """Whether the page of a command has that playbook in full; such a play is read below."""
    return any(one.page == block.page and one.text.startswith(f"# {book}\n") for one in YAML)


def test_every_run_names_playbooks_and_their_variables():
    runs = called("ansible-playbook")
    assert len(runs) > 15
    for block, words in runs:
        books = playbook_of(words)
        assert books, f"{block}: {' '.join(words)} names no playbook"
        extra = [word for before, word in zip(words, words[1:]) if before in ("-e", "--extra-vars")]
        given = {word.partition("=")[0] for word in extra if word[0] not in "@{"}
        given |= {name for word in extra if word[0] == "{" for name in json.loads(word)}
        for book in books:
            if is_shown(block, book):
                continue
            assert (ROOT / book).is_file(), f"{block}: {book} is not there"
            meta = ROOT / book.replace(".yml", ".meta.yml")
            known = ROLE_VARIABLES | (set(specification(meta)) if meta.exists() else set())
            assert given <= known, f"{block}: {book} has no {given - known}"


def test_ansible_takes_the_options_of_every_command():
    argvs = [[PARSERS[Path(words[0]).name], *words] for _block, words in called(*PARSERS)]
    assert len(argvs) > 20
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(argvs), capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_ansible_reads_every_playbook_and_every_play_that_is_shown(tmp_path):
    runs = [(block, book) for block, words in called("ansible-playbook") for book in playbook_of(words)]
    books = sorted({ROOT / book for block, book in runs if not is_shown(block, book)})
    books = [book for book in books if not ELSEWHERE.search(book.read_text())]
    shown = 0
    for block in YAML:
        value = yaml.safe_load(block.text)
        if isinstance(value, list) and all("hosts" in play for play in value) and not ELSEWHERE.search(block.text):
            shown += 1
            books.append(tmp_path / f"{shown}.yml")
            books[-1].write_text(block.text)
    assert shown > 2
    playbook = [sys.executable, "-m", "ansible", "playbook", "--syntax-check", f"--inventory={FLEET}/hosts.yml"]
    done = subprocess.run([*playbook, *books], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("playbook: ") == len(books)


def test_the_lab_takes_every_command():
    where = importlib.util.spec_from_file_location("documented_lab", ROOT / "tests/lab/lab.py")
    lab = importlib.util.module_from_spec(where)
    where.loader.exec_module(lab)
    runs = called("lab")
    assert {words[1] for _block, words in runs} >= {
        "wheels",
        "up",
        "status",
        "inventory",
        "kill",
        "boot",
        "ssh",
        "down",
    }
    for _block, words in runs:
        lab.parser().parse_args(words[1:])


def test_the_load_takes_its_command():
    runs = [words for _block, words in called("python3") if words[1] == "tests/load/load.py"]
    assert runs
    for words in runs:
        known = subprocess.run(
            [sys.executable, *words[1:2], "--help"], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", known.stdout))


def block_of(page: str, begins: str) -> str:
    return next(block.text for block in BLOCKS if block.page == page and block.text.startswith(begins))


@pytest.mark.parametrize(
    "file", ["group_vars/all.yml", "group_vars/vllm_engines/main.yml", "group_vars/vllm_routers/main.yml"]
)
def test_install_shows_the_example_inventory(file):
    shown = yaml.safe_load(block_of("docs/install.md", f"# {file}\n"))
    there = yaml.safe_load((FLEET / file).read_text())
    assert shown
    assert {name: there.get(name) for name in shown} == shown


def test_roles_accept_what_is_shown(tmp_path):
    """By their own preflight, which judges variables alone: the example inventory, and what preload.md declares."""
    shown = yaml.safe_load(block_of("docs/preload.md", "vllm_preload_instances:\n"))
    other = tmp_path / "hosts.yml"
    other.write_text(json.dumps({"all": {"hosts": {"preloaded": {"vllm_runtime_version": "0.33.0", **shown}}}}))
    play = tmp_path / "play.yml"
    roles = [
        {"ansible.builtin.import_role": {"name": f"baremetal.vllm.{role}", "tasks_from": "preflight"}}
        for role in ("vllm_engine", "vllm_preload")
    ]
    play.write_text(json.dumps([{"hosts": "gpu01:preloaded", "gather_facts": False, "tasks": roles}]))
    argv = [sys.executable, "-m", "ansible", "playbook", f"--inventory={FLEET}/hosts.yml", f"--inventory={other}"]
    argv += [
        "--connection=local",
        "-e",
        "vault_vllm_api_key=secret",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    done = subprocess.run([*argv, str(play)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    recap = done.stdout.partition("PLAY RECAP")[2]
    assert all(re.search(rf"{host} +: ok=[1-9]", recap) for host in ("gpu01", "preloaded")), recap


@pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")
def test_the_cheap_commands_of_the_quickstart_run():
    text = (ROOT / "docs/quickstart.md").read_text()
    for command in ("make deps", "make demo"):
        assert f"\n{command}\n" in text
        subprocess.run([*command.split(), "--dry-run"], check=True, capture_output=True, cwd=ROOT)
    assert "\ntests/lab/lab status\n" in text
    done = subprocess.run(["tests/lab/lab", "status"], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip()
