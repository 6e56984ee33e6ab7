# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module vllm_weights, each state four times, and the command; between the runs files are read by other means."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli, hashing, store
from ansible_collections.baremetal.vllm.plugins.modules import vllm_weights
from ansible_collections.baremetal.vllm.tests.sim import model as sim

HOST = socket.gethostname()
ZERO = f"sha256:{'0' * 64}"


@pytest.fixture
def place(monkeypatch):
    """A directory that every user can enter, with the checkpoint ``m``; the host's own files are in ``host``."""
    path = Path(tempfile.mkdtemp(prefix="weights-", dir="/tmp"))
    path.chmod(0o755)
    monkeypatch.setenv(store.ROOT_VARIABLE, str(path / "host"))
    now = time.time_ns
    monkeypatch.setattr(hashing.time, "time_ns", lambda: now() + 10_000_000_000)  # what was just written is old
    sim.write(path / "m", "a")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(run_module, place):
    def call(**options):
        return run_module(vllm_weights.main, **{"path": str(place / "m"), **options})

    return call


def digest(folder: Path) -> str:
    """By other means: what sha256sum would print, hashed."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return "sha256:" + hashlib.sha256("".join(["vllm-weights 1 full\n", *lines]).encode()).hexdigest()


def files(place: Path) -> dict[str, bytes]:
    """All that the host keeps, but for locks."""
    kept = place / "host"
    return {
        str(path.relative_to(kept)): path.read_bytes()
        for path in kept.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def records(place: Path) -> list[dict]:
    return [json.loads(text) for name, text in files(place).items() if not name.endswith(".hashes.json")]


def from_nothing(place, run):
    return {}


def from_other_weights(place, run):
    run()
    sim.write(place / "m", "b")
    return {}


def from_the_other_method(place, run):
    run(method="sample")
    return {"method": "full"}


def with_everything_allowed(place, run):
    (place / "approved").write_text(f"{digest(place / 'm')}\n")
    return {"allowed": [ZERO], "allowed_file": str(place / "approved"), "user": "nobody"}


@pytest.mark.parametrize("start", [from_nothing, from_other_weights, from_the_other_method, with_everything_allowed])
def test_four_runs_of_recorded(place, run, start):
    options = start(place, run)
    if os.geteuid() != 0:
        options.pop("user", None)
    before, wanted = files(place), digest(place / "m")

    predicted = run(check_mode=True, diff=True, **options)
    assert predicted["changed"]
    assert files(place) == before, "check mode wrote something"

    real = run(diff=True, **options)
    assert real["changed"]
    (kept,) = records(place)
    assert (kept["digest"], kept["path"], kept["method"]) == (wanted, str(place / "m"), "full")
    assert kept["bytes"] == real["bytes"] == (place / "m/model.safetensors").stat().st_size
    for name, one in kept["files"].items():
        assert one["digest"] == hashlib.sha256((place / "m" / name).read_bytes()).hexdigest()
    assert not {"owner", "mode", "uid"} & set(real), "Ansible adds these where a result has a path"
    for key in ("actions", "before", "after", "digest", "method", "bytes", "files", "diff"):
        assert predicted[key] == real[key]
    assert real["actions"] == [f"{place / 'm'}: record {wanted} (full, 2 files)"]
    assert real["diff"]["after"]["digest"] == real["after"]["digest"] == real["digest"] == wanted

    kept = files(place)
    again = run(**options)
    assert not again["changed"]
    assert again["actions"] == []
    assert again["before"] == again["after"] == real["after"]
    assert {name: files(place)[name] for name in kept if not name.endswith(".hashes.json")} == {
        name: text for name, text in kept.items() if not name.endswith(".hashes.json")
    }
    kept = files(place)
    assert not run(check_mode=True, **options)["changed"]
    assert files(place) == kept


def test_four_runs_of_matching(place, run):
    run()
    before = records(place)
    for check_mode in (True, False, False, True):
        result = run(state="matching", check_mode=check_mode)
        assert not result["changed"]
        assert result["digest"] == result["after"]["digest"] == digest(place / "m")
        assert (result["files"], result["actions"]) == ({}, [])
        assert records(place) == before
    for path in (place / "host/var/lib/vllm/weights").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_four_runs_of_matching_against_other_weights_of_equal_shapes(place, run):
    """The plain engine would go on with the old ones: names, types and shapes are all that it compares."""
    old, seen = run()["digest"], sim.read(str(place / "m"))
    sim.write(place / "m", "b")
    assert sim.read(str(place / "m")).headers == seen.headers
    assert sim.read(str(place / "m")).content != seen.content
    before, new = records(place), digest(place / "m")
    for method in ("full", None):
        for check_mode in (True, False, False, True):
            result = run(state="matching", check_mode=check_mode, diff=True, **({"method": method} if method else {}))
            assert result["failed"]
            assert not result["changed"]
            assert (
                f"host {HOST}: the weights in {place / 'm'} are {new}, recorded was {old}: model.safetensors"
                in (result["msg"])
            )
            assert result["files"] == {"model.safetensors": "has another content (584 bytes)"}
            assert result["digest"] == new
            assert (result["diff"]["before"]["digest"], result["diff"]["after"]["digest"]) == (old, new)
            assert "state=recorded" in result["next_step"]
            assert records(place) == before


def test_the_method_of_the_record_is_the_default(place, run):
    sample = run(method="sample")
    assert run()["method"] == "sample"
    result = run(state="matching")
    assert (result["digest"], result["method"]) == (sample["digest"], "sample")
    assert "recorded by the method sample, so that one taken by full" in run(state="matching", method="full")["msg"]


def test_without_a_record(place, run):
    result = run(state="matching")
    assert f"no manifest was recorded for {place / 'm'}, and no allowed digests are given" in result["msg"]
    assert files(place) == {}
    result = run(state="matching", allowed=[digest(place / "m")])
    assert (result["changed"], result["digest"], result["before"], result["after"]) == (
        False,
        digest(place / "m"),
        {},
        {},
    )
    assert records(place) == []


@pytest.mark.parametrize("state", ["recorded", "matching"])
def test_what_is_not_allowed_is_not_recorded(place, run, state):
    for check_mode in (True, False):
        result = run(state=state, allowed=[ZERO], check_mode=check_mode)
        assert result["failed"]
        assert digest(place / "m") in result["msg"]
        assert ZERO in result["msg"]
        assert result["digest"] == digest(place / "m")
        assert not result["changed"]
        assert records(place) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_file_names_user_and_path(place, run):
    (place / "m/model.safetensors").chmod(0o600)
    for check_mode in (True, False):
        result = run(user="nobody", check_mode=check_mode)
        assert (
            f"host {HOST}: user nobody cannot read {place / 'm/model.safetensors'}: Permission denied" in result["msg"]
        )
        assert f"namei -l {place / 'm/model.safetensors'}" in result["next_step"]
        assert (result["user"], result["unreadable"]) == ("nobody", str(place / "m/model.safetensors"))
        assert files(place) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "'' is no absolute path"),
        ({"path": "Qwen/Qwen3-8B"}, "is no absolute path"),
        ({"path": "/nowhere"}, "cannot read /nowhere: No such file or directory"),
        ({"state": "absent"}, "state must be one of"),
        ({"method": "half"}, "method must be one of"),
        ({"timeout": 0}, "timeout must be above 0, not 0"),
        ({"timeout": "nan"}, "timeout must be above 0, not nan"),
        ({"allowed": ["sha256:1"]}, "'sha256:1' is no digest"),
        ({"allowed_signers": "/etc/x"}, "missing parameter(s) required by 'allowed_signers': allowed_file"),
    ],
)
def test_wrong_options(place, run, options, says):
    result = run(**options)
    assert says in result["msg"]
    assert not result.get("changed")
    assert "hashed" not in result, "it is said before long hashing"
    assert files(place) == {}


# The command.


@pytest.fixture
def command(place, capsys):
    def call(*words):
        code = cli.main(["weights", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_command_prints_the_manifest(place, command, monkeypatch):
    monkeypatch.setattr(hashing, "REPORT_EVERY", 0)
    monkeypatch.chdir(place)
    code, out, err = command("m")
    manifest = json.loads(out)
    assert code == 0
    assert (manifest["digest"], manifest["path"]) == (digest(place / "m"), str(place / "m"))
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]
    assert "GiB/s" in err, "progress goes where it does not spoil the JSON"
    assert records(place) == []


def test_the_command_records_and_matches(place, command):
    path = place / "m"
    code, _out, err = command(path, "--state", "matching")
    assert (code, "no manifest was recorded" in err) == (2, True)
    assert json.loads(command(path, "--state", "recorded", "--check")[1])["changed"] is True
    assert files(place) == {}
    assert json.loads(command(path, "--state", "recorded")[1])["changed"] is True
    assert command(path, "--state", "matching", "--allowed", digest(path), "--allowed", ZERO)[0] == 0
    sim.write(path, "b")
    code, out, err = command(path, "--state", "matching")
    assert (code, out) == (5, "")
    assert digest(path) in err
    assert "model.safetensors has another content" in err


def test_the_command_tells_what_is_not_allowed(place, command):
    (place / "approved").write_text(ZERO)
    code, out, err = command(place / "m", "--allowed-file", place / "approved")
    assert (code, out) == (5, "")
    assert f"none of the 1 allowed in {place / 'approved'}: {ZERO}" in err
