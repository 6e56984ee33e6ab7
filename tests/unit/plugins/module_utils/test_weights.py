# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Manifests of real files: what they cover, what they find, when content is read again, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import (
    checkpoint,
    hashing,
    lease,
    store,
    tensors,
    weights,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.deadline import Deadline
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import (
    DeadlineExceeded,
    LifecycleError,
    Refused,
    UnknownState,
    UsageError,
)

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MIB = 2**20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def safetensors(path: Path, content: dict[str, bytes]) -> None:
    header, at = {}, 0
    for name, data in content.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(content.values()))


def values(seed: str, size: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(size)


def build(folder: Path, seed: str = "a", size: int = 200_000) -> Path:
    """A checkpoint of two shards whose headers have the same length."""
    folder.mkdir(parents=True)
    for index, shard in enumerate(SHARDS):
        safetensors(
            folder / shard, {f"layers.{index}.w": values(f"{seed}{index}", size), f"layers.{index}.b": b"12345"}
        )
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """Where manifests are kept."""
    monkeypatch.setenv(store.ROOT_VARIABLE, str(tmp_path / "host"))
    return tmp_path / "host"


@pytest.fixture
def model(tmp_path):
    return build(tmp_path / "model")


@pytest.fixture
def later(monkeypatch):
    """The library's clock is ahead, so that files written a moment ago are old."""
    now = time.time_ns
    monkeypatch.setattr(hashing.time, "time_ns", lambda: now() + 10_000_000_000)


@pytest.fixture
def open_place():
    """A directory that every user can enter, unlike those of pytest."""
    place = Path(tempfile.mkdtemp(prefix="weights-", dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def bytes_read() -> int:
    """By the kernel's count, all threads of this process."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


# What the digest is.


@pytest.mark.parametrize("odd", ["plain.txt", "with space.txt", "back\\slash.txt", "line\nfeed.txt", b"l\xe4tin.txt"])
def test_the_digest_is_that_of_what_sha256sum_prints(model, odd):
    (model / os.fsdecode(odd)).write_text("x")
    (model / "sub").mkdir()
    (model / "sub/a").write_text("y")
    names = sorted([*(os.fsencode(name) for name in os.listdir(model) if name != "sub"), b"sub/a"])
    printed = subprocess.run(["sha256sum", *names], cwd=model, capture_output=True, check=True).stdout
    wanted = hashlib.sha256(b"vllm-weights 1 full\n" + printed).hexdigest()
    assert weights.take(str(model)).digest == f"sha256:{wanted}"


@pytest.mark.parametrize("method", weights.METHODS)
def test_it_is_the_same_wherever_the_checkpoint_lies(tmp_path, model, method):
    there = weights.take(str(model), method=method)
    shutil.copytree(model, tmp_path / "other/place")
    (tmp_path / "link").symlink_to("model")
    for path in (tmp_path / "other/place", tmp_path / "link", f"{model}/", f"{model}/../model"):
        again = weights.take(str(path), method=method)
        assert (again.digest, again.compare(there), there.compare(again)) == (there.digest, [], [])


def test_a_snapshot_of_a_hugging_face_cache_equals_its_plain_copy(tmp_path, model):
    repository = tmp_path / "hub/models--a--b"
    snapshot = repository / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in model.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, repository / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    assert weights.take(str(snapshot)).digest == weights.take(str(model)).digest


def test_the_method_is_part_of_it(model):
    full, sample = (weights.take(str(model), method=method) for method in weights.METHODS)
    assert full.digest != sample.digest
    assert full.compare(sample) == ["it was taken by the method sample, not full: the two cannot be compared"]


def test_what_no_loader_reads_does_not_count(model):
    before = weights.take(str(model))
    for name in (
        ".cache/huggingface/download/x.metadata",
        ".gitattributes",
        ".git/HEAD",
        "lost+found/x",
        "empty/.keep",
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("time stamps")
    assert weights.take(str(model)) == before


def test_a_single_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + values("g", 1000))
    manifest = weights.take(str(tmp_path / "m.gguf"))
    wanted = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    assert manifest.files == {"m.gguf": {"size": 1004, "digest": wanted}}
    assert manifest.bytes == 1004


def test_equal_shapes_and_other_values_are_told_apart(tmp_path):
    """vLLM's own fingerprint takes these two for one."""
    one, two = build(tmp_path / "one", "a"), build(tmp_path / "two", "b")
    for shard in SHARDS:
        headers = [(path / shard).read_bytes()[: -(200_000 + 5)] for path in (one, two)]
        assert headers[0] == headers[1]
    for method in weights.METHODS:
        now = weights.take(str(two), method=method)
        assert weights.take(str(one), method=method).compare(now) == [
            f"{shard} has another content ({(one / shard).stat().st_size} bytes)" for shard in SHARDS
        ]


# What it finds. Each change leaves the file's size and mtime as they were, where it can.


def keep_mtime(path: Path, write) -> None:
    seen = path.stat()
    write(path)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def change_byte(model):
    def write(path):
        with path.open("r+b") as stream:
            stream.seek(100_000)
            byte = stream.read(1)
            stream.seek(100_000)
            stream.write(bytes([byte[0] ^ 1]))

    keep_mtime(model / SHARDS[0], write)


def change_stretch(model):
    """A quarter of a tensor and a little more."""

    def write(path):
        with path.open("r+b") as stream:
            stream.seek(100_000)
            stream.write(bytes(54_100))

    keep_mtime(model / SHARDS[0], write)


def swap(model):
    one, two = (model / shard for shard in SHARDS)
    one.rename(model / "x")
    two.rename(one)
    (model / "x").rename(two)


def exchange_for_link(model):
    """The content is the same."""
    elsewhere = model.parent / "elsewhere.safetensors"
    (model / SHARDS[0]).rename(elsewhere)
    (model / SHARDS[0]).symlink_to("../elsewhere.safetensors")


def link_directory(model):
    (model.parent / "adapter").mkdir()
    (model.parent / "adapter/adapter_model.safetensors").write_bytes((model / SHARDS[0]).read_bytes())
    (model / "adapter").symlink_to(model.parent / "adapter")


def add_below(model):
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text("{}")


FOUND = {
    "changed byte": (change_byte, [f"{SHARDS[0]} has another content (200205 bytes)"]),
    "changed stretch": (change_stretch, [f"{SHARDS[0]} has another content (200205 bytes)"]),
    "swapped shards": (
        swap,
        [f"{SHARDS[0]} has the content of {SHARDS[1]}", f"{SHARDS[1]} has the content of {SHARDS[0]}"],
    ),
    "truncated": (
        lambda model: os.truncate(model / SHARDS[1], 150_000),
        [f"{SHARDS[1]} has another content (150000 bytes, not 200205)"],
    ),
    "emptied": (
        lambda model: os.truncate(model / SHARDS[1], 0),
        [f"{SHARDS[1]} has another content (0 bytes, not 200205)"],
    ),
    "added": (lambda model: (model / "chat_template.jinja").write_text("x"), ["chat_template.jinja was added"]),
    "added below": (add_below, ["1_Pooling/config.json was added"]),
    "removed": (lambda model: (model / SHARDS[1]).unlink(), [f"{SHARDS[1]} is gone"]),
    "renamed": (
        lambda model: (model / "tokenizer.json").rename(model / "vocab.json"),
        ["tokenizer.json is gone", "vocab.json was added"],
    ),
    "configuration": (
        lambda model: (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLN"]}'),
        ["config.json has another content (39 bytes)"],
    ),
    "link out": (exchange_for_link, [f"{SHARDS[0]} is a link to ../elsewhere.safetensors"]),
    "linked directory": (link_directory, ["adapter/adapter_model.safetensors was added"]),
}


@pytest.mark.parametrize("change", FOUND)
@pytest.mark.parametrize("method", weights.METHODS)
def test_every_kind_of_change_is_found(model, later, method, change):
    if (method, change) == ("sample", "changed byte"):
        pytest.skip("documented: a sample need not find it")
    before = weights.take(str(model), method=method)
    assert weights.take(str(model), method=method).hashed == 0
    act, wanted = FOUND[change]
    act(model)
    if method == "sample" and change in ("truncated", "emptied"):
        with pytest.raises(UsageError, match=rf"{SHARDS[1]} is no whole safetensors file: it has \d+ bytes") as caught:
            weights.take(str(model), method=method)
        assert SHARDS[1] in caught.value.details["files"]
        return
    after = weights.take(str(model), method=method)
    assert before.compare(after) == wanted
    assert after.digest != before.digest
    assert after.compare(before), "nor does the way back go unseen"


def test_a_link_that_is_turned_to_an_equal_file_is_found(model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    (model / "generation_config.json").symlink_to(tmp_path / "a")
    before = weights.take(str(model))
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to(tmp_path / "b")
    assert before.compare(weights.take(str(model))) == [f"generation_config.json is a link to {tmp_path / 'b'}"]
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text("same")
    assert before.compare(weights.take(str(model))) == [
        f"generation_config.json is no link to {tmp_path / 'a'} any more"
    ]


def test_a_link_to_a_directory_that_is_turned_is_found(model, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep/adapter_config.json").write_text("same")
    (model / "adapter").symlink_to("../one")
    before = weights.take(str(model))
    (model / "adapter").unlink()
    (model / "adapter").symlink_to("../two")
    assert before.compare(weights.take(str(model))) == ["adapter/deep/adapter_config.json is a link to ../two"]


def test_what_a_link_points_to_is_watched(model, tmp_path, later):
    (tmp_path / "shared.json").write_text("one")
    (model / "generation_config.json").symlink_to(tmp_path / "shared.json")
    before = weights.take(str(model))
    (tmp_path / "shared.json").write_text("two")
    assert before.compare(weights.take(str(model))) == ["generation_config.json has another content (3 bytes)"]


NAMES = st.sampled_from(["a.safetensors", "b.bin", "c", "d/e"])
FILES = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {"size": st.just(1), "digest": st.sampled_from(["0" * 64, "1" * 64])},
        optional={"link": st.sampled_from(["../x", "/y"])},
    ),
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(FILES, FILES)
def test_no_difference_means_equal_digests(one, two):
    made = [weights.Manifest("/m", "full", weights.digest_of("full", files), 1, files) for files in (one, two)]
    assert (made[0].compare(made[1]) == []) == (made[0].digest == made[1].digest)


# When content is read again.


def test_a_second_run_reads_no_content_of_13_gib(model, later, monkeypatch):
    """The digests of the first run are made up, to spare the time; that it would read is shown at the end."""
    for index in range(3):
        with open(model / f"big-{index}.bin", "wb") as stream:
            stream.truncate(13 * 2**30 // 3)  # no block of it is on the disk
    with monkeypatch.context() as quick:
        quick.setattr(hashing.Hashing, "_whole", lambda self, descriptor: "0" * 64)
        first = weights.take(str(model))
    before = bytes_read()
    second = weights.take(str(model))
    assert bytes_read() - before < MIB
    assert (second, second.hashed) == (first, 0)
    os.truncate(model / "big-1.bin", 8 * MIB)
    before = bytes_read()
    third = weights.take(str(model))
    assert 8 * MIB <= bytes_read() - before < 9 * MIB
    assert third.hashed == 8 * MIB
    assert [line.split()[0] for line in first.compare(third)] == ["big-1.bin"]


def test_another_method_and_another_name_use_what_is_known(model, tmp_path, later):
    weights.take(str(model))
    sample = weights.take(str(model), method="sample")
    assert 0 < sample.hashed <= 2 * (200_205 + 8 * 4096), "only the shards"
    (model / "tokenizer.json").rename(model / "renamed.json")
    os.link(model / SHARDS[0], model / "again.safetensors")  # changes the inode's ctime
    assert weights.take(str(model)).hashed == 200_205 + 13  # nor does a new name leave it alone
    assert weights.take(str(model)).hashed == 0
    (tmp_path / "link").symlink_to(model)
    assert weights.take(str(tmp_path / "link")).hashed == 0


def test_a_young_file_is_hashed_again(model, monkeypatch):
    """What a file system with a clock tick of two seconds would hide. The tick may end between the writes: then the
    stamp shows it."""
    exact = checkpoint.Stamp.of

    def coarse(seen):
        tick = 2_000_000_000
        stamp = exact(seen)
        return stamp._replace(mtime_ns=stamp.mtime_ns // tick * tick, ctime_ns=stamp.ctime_ns // tick * tick)

    monkeypatch.setattr(checkpoint.Stamp, "of", coarse)
    before = weights.take(str(model))
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLN"]}')
    assert before.compare(weights.take(str(model))) == ["config.json has another content (39 bytes)"]


@pytest.mark.parametrize(("seconds", "known"), [(-3600, False), (0, False), (2, False), (3, True), (3600, True)])
def test_a_file_is_remembered_once_no_later_write_can_have_its_stamp(model, monkeypatch, seconds, known):
    ctime = max(path.stat().st_ctime_ns for path in model.iterdir())
    oldest = min(path.stat().st_ctime_ns for path in model.iterdir())
    monkeypatch.setattr(hashing.time, "time_ns", lambda: (ctime if seconds > 2 else oldest) + seconds * 1_000_000_000)
    first = weights.take(str(model))
    assert first.hashed > 400_000
    assert weights.take(str(model)).hashed == (0 if known else first.hashed)


def test_a_large_file_that_was_just_written_is_waited_for(model, monkeypatch):
    """Rather than hashed again by the next run."""
    monkeypatch.setattr(hashing, "WORTH_WAITING", 200_000)
    monkeypatch.setattr(checkpoint, "YOUNG_NS", 300_000_000)
    monkeypatch.setattr(hashing, "YOUNG_NS", 300_000_000)
    os.utime(model / SHARDS[0])
    weights.take(str(model))
    again = weights.take(str(model))
    assert again.hashed < 1000, "the small ones at most"


def test_nothing_is_written_on_request(model, host, later):
    assert weights.take(str(model), remember=False).hashed > 0
    assert weights.take(str(model), remember=False).hashed > 0
    assert not host.exists()
    weights.take(str(model))
    assert weights.take(str(model), remember=False).hashed == 0


def test_what_is_remembered_is_private_and_forgets_what_is_gone(model, host, later):
    weights.take(str(model))
    (kept,) = (host / "var/lib/vllm/weights").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert len(json.loads(kept.read_text())["hashes"]) == 4
    (model / "tokenizer.json").unlink()
    (model / "config.json").write_text("{}")
    weights.take(str(model))
    assert len(json.loads(kept.read_text())["hashes"]) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "root": "/other", "hashes": []}',
        '{"schema": 1, "root": "ROOT", "hashes": {}}',
        '{"schema": 1, "root": "ROOT", "hashes": [1]}',
        '{"schema": 1, "root": "ROOT", "hashes": [[1, 2, 3, 4, 5, "whole", 6]]}',
        '{"schema": 1, "root": "ROOT", "hashes": [[1, 2, 3, "x", 5, "whole", "0"]]}',
    ],
)
def test_a_broken_memory_is_no_memory(model, host, later, text):
    first = weights.take(str(model))
    (kept,) = (host / "var/lib/vllm/weights").iterdir()
    kept.write_text(text.replace("ROOT", str(model)))
    again = weights.take(str(model))
    assert (again, again.hashed) == (first, first.hashed)
    assert weights.take(str(model)).hashed == 0


# While it hashes.


def during(monkeypatch, act):
    """Call ``act(hashing, number)`` in the middle of the hashing of each file."""
    whole, calls = hashing.Hashing._whole, []

    def acting(self, descriptor):
        os.pread(descriptor, 10, 0)
        calls.append(descriptor)
        act(self, len(calls))
        return whole(self, descriptor)

    monkeypatch.setattr(hashing.Hashing, "_whole", acting)


def test_a_file_that_changes_meanwhile_is_hashed_again(model, monkeypatch, later):
    during(monkeypatch, lambda work, number: number == 1 and change_byte(model))
    said = []
    manifest = weights.take(str(model), report=said.append)
    assert said == [f"{model}: changed while it was read: {SHARDS[0]}"]
    assert manifest.files[SHARDS[0]]["digest"] == hashlib.sha256((model / SHARDS[0]).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("act", "left"),
    [
        (lambda model: (model / "new.json").write_text("{}"), ["config.json", "new.json", "tokenizer.json"]),
        (lambda model: (model / "tokenizer.json").unlink(), ["config.json"]),
        (lambda model: (model / "tokenizer.json").rename(model / "new.json"), ["config.json", "new.json"]),
    ],
)
def test_files_that_come_and_go_meanwhile(model, monkeypatch, act, left):
    during(monkeypatch, lambda work, number: number == 1 and act(model))
    assert sorted(weights.take(str(model)).files) == sorted([*SHARDS, *left])


def test_a_file_that_is_being_written_is_an_error_and_not_recorded(model, host, monkeypatch, later):
    """The copy is not complete yet."""

    def act(work, number):
        with open(model / SHARDS[0], "ab") as stream:
            stream.write(b"more")

    during(monkeypatch, act)
    with pytest.raises(
        UnknownState, match=rf"{model} changes while it is read, 3 times in a row: {SHARDS[0]}"
    ) as caught:
        weights.bring(str(model), "recorded")
    assert "copy or the download" in caught.value.next_step
    assert weights.recorded(str(model)) is None
    for kept in (host / "var/lib/vllm/weights").glob("*.hashes.json"):
        inodes = {row[1] for row in json.loads(kept.read_text())["hashes"]}
        assert (model / SHARDS[0]).stat().st_ino not in inodes


def test_it_gives_way_to_all_other_work(model, monkeypatch):
    seen = []
    during(monkeypatch, lambda work, number: seen.append(os.sched_getscheduler(0)))
    weights.take(str(model))
    assert set(seen) == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the caller itself does not"


def test_it_hashes_on_all_cores(model, monkeypatch):
    """Each of two waits for the other one."""
    monkeypatch.setattr(hashing.os, "sched_getaffinity", lambda pid: {0, 1})
    together = threading.Barrier(2)
    during(monkeypatch, lambda work, number: together.wait(60) if number <= 2 else None)
    weights.take(str(model))


def test_one_checkpoint_is_hashed_by_one_run_at_a_time(model, host, monkeypatch, later):
    """The second one waits, and then has nothing to do. No other lock is taken."""
    begun, go_on = threading.Event(), threading.Event()

    def act(work, number):
        begun.set()
        assert go_on.wait(60)

    during(monkeypatch, act)
    results, said = [], []

    def second(message):
        said.append(message)
        go_on.set()

    first = threading.Thread(target=lambda: results.append(weights.take(str(model))))
    first.start()
    assert begun.wait(60)
    held = [path.name for path in (host / "run/vllm-lifecycle").iterdir()]
    with lease.locked("chat", Deadline(0)), lease.locked("gpu-GPU-1", Deadline(0)):
        waited = weights.take(str(model), report=second)
    first.join()
    assert said == [f"{model}: another run hashes it, and this one waits for that"]
    assert (waited, waited.hashed) == (results[0], 0)
    assert len(held) == 1
    assert held[0].startswith("weights-model-")


def test_waiting_for_another_run_has_an_end(model):
    weights.take(str(model))
    (lock,) = (store.lock_dir()).iterdir()
    with lease.locked(lock.stem, Deadline(0)), pytest.raises(Refused, match="weights-model-"):
        weights.take(str(model), timeout=0.2)


def test_the_time_out_names_what_is_left_and_keeps_what_is_done(model, monkeypatch, later):
    (model / "huge.bin").touch()
    os.truncate(model / "huge.bin", 2**40)  # hours
    monkeypatch.setattr(hashing.os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(DeadlineExceeded, match=r"of 1024\.00 GiB and \d of 5 files hashed") as caught:
        weights.take(str(model), timeout=1)
    assert "huge.bin" in caught.value.details["left"]["files"]
    assert "raise the time-out; the next run goes on" in caught.value.next_step
    done = 5 - len(caught.value.details["left"]["files"])
    os.truncate(model / "huge.bin", 0)
    again = weights.take(str(model))
    assert again.hashed <= sum(path.stat().st_size for path in model.iterdir()) * (done < 4)


def test_long_hashing_says_how_far_it_is(model, monkeypatch):
    monkeypatch.setattr(hashing, "REPORT_EVERY", 0)
    said = []
    weights.take(str(model), report=said.append)
    assert said
    for message in said:
        assert message.startswith(f"{model}: 0.00 of 0.00 GiB and ")
        assert message.endswith("GiB/s")
    assert " and 4 of 4 files hashed" in said[-1]


# What is refused.


def refused(path, **options):
    with pytest.raises(UsageError) as caught:
        weights.take(str(path), **options)
    return f"{caught.value.text}"


@as_root
@pytest.mark.parametrize("what", ["config.json", SHARDS[1], "sub", "."])
def test_what_the_service_user_cannot_read_is_named_with_the_user(open_place, what):
    model = build(open_place / "model")
    (model / "sub").mkdir()
    (model / "sub/x").touch()
    assert weights.take(str(model), user="nobody")
    (model / what).chmod(0o700 if (model / what).is_dir() else 0o600)
    text = refused(model, user="nobody")
    where = os.path.normpath(model / what)
    assert f"user nobody cannot read {where}" in text
    assert "Permission denied" in text
    assert "namei -l" in text
    assert weights.take(str(model)), "root can"
    assert weights.take(str(model), user="root")


@as_root
def test_a_closed_directory_on_the_way_is_found(open_place):
    (open_place / "closed").mkdir(mode=0o700)
    build(open_place / "closed/model")
    (open_place / "link").symlink_to("closed/model")
    assert f"user nobody cannot read {open_place / 'link'}: Permission denied" in refused(
        open_place / "link", user="nobody"
    )


@as_root
def test_it_is_found_also_when_everything_is_remembered(open_place, later):
    model = build(open_place / "model")
    weights.take(str(model), user="nobody")
    open_place.chmod(0o700)
    assert "user nobody cannot read" in refused(model, user="nobody")


@as_root
def test_an_interpreter_that_the_user_may_not_run_is_no_hindrance(open_place, monkeypatch):
    model = build(open_place / "model")
    own = open_place / "python"
    own.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(checkpoint.sys, "executable", str(own))
    assert weights.take(str(model), user="nobody")
    monkeypatch.setattr(checkpoint, "_SYSTEM_PYTHON", str(own))
    assert "user nobody could run no Python" in refused(model, user="nobody")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_what_we_cannot_read_ourselves(model):
    (model / SHARDS[0]).chmod(0)
    assert f"cannot read {model / SHARDS[0]}: Permission denied" in refused(model)
    assert "only root can find out" in refused(model, user="root")


def test_places_that_hold_no_checkpoint(model, tmp_path, monkeypatch):
    assert "'Qwen/Qwen3-8B' is no absolute path" in refused("Qwen/Qwen3-8B")
    assert "'' is no absolute path" in refused("")
    assert f"cannot read {tmp_path / 'none'}: No such file or directory" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    assert "holds no weight file" in refused(tmp_path / "empty")
    assert "has no user 'nosuchuser'" in refused(model, user="nosuchuser")
    assert "no method 'half'" in refused(model, method="half")
    monkeypatch.setattr(checkpoint, "MAX_FILES", 3)
    assert "more than 3 files, so it is no checkpoint" in refused(model)


def test_links_to_nowhere_and_in_circles(model):
    (model / "gone.json").symlink_to("../not-there.json")
    text = refused(model)
    assert f"cannot read {model / 'gone.json'}: it is a link to ../not-there.json, where nothing can be reached" in text
    assert f"namei -l {model / 'gone.json'}" in text
    (model / "gone.json").unlink()
    (model / "round").symlink_to("round")
    assert f"cannot read {model / 'round'}" in refused(model)
    (model / "round").unlink()
    (model / "up").symlink_to("..")
    (model.parent / "again").symlink_to("model")
    assert "leads back to a directory above it" in refused(model)


def test_what_is_no_file(model):
    os.mkfifo(model / "pipe")
    assert f"{model / 'pipe'} is neither a file nor a directory" in refused(model)


def test_without_root(model, monkeypatch):
    monkeypatch.delenv(store.ROOT_VARIABLE)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "as root only" in refused(model)


# How many bytes a loader reads.


@pytest.mark.parametrize(
    ("sizes", "index", "wanted"),
    [
        ({"model.safetensors": 5, "pytorch_model.bin": 7}, None, 5),
        ({"pytorch_model.bin": 7, "training_args.bin": 1, "original/consolidated.00.pth": 9}, None, 7),
        ({"consolidated.safetensors": 5, "model-1.safetensors": 2, "model-2.safetensors": 4}, None, 6),
        ({"consolidated.safetensors": 5}, None, 5),
        ({"a.safetensors": 2, "b.safetensors": 4, "c.safetensors": 8}, ["a.safetensors", "b.safetensors"], 6),
        ({"a.safetensors": 2, "b.safetensors": 4}, ["a.safetensors", "gone.safetensors"], 6),
        ({"a.safetensors": 2, "b.safetensors": 4}, [["a"]], 6),
        ({"sub/a.safetensors": 2, "config.json": 4}, None, 2),
        ({"m.gguf": 3}, None, 3),
    ],
)
def test_bytes(tmp_path, sizes, index, wanted):
    model = tmp_path / "model"
    for name, size in sizes.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(bytes(size))
    if index is not None:
        text = json.dumps({"weight_map": {str(number): name for number, name in enumerate(index)}})
        (model / checkpoint.INDEX).write_text(text)
    assert weights.take(str(model)).bytes == wanted


# Samples.


SIZES = st.one_of(st.integers(0, 100_000), st.integers(0, 2**40))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.text(max_size=20), SIZES)
def test_blocks_lie_in_their_tensor_and_leave_no_long_stretch_out(name, size):
    hypothesis.assume(size <= 2**36)
    tensor = tensors.Tensor(name, 1000, 1000 + size)
    found = list(tensors.blocks(tensor))
    assert found == list(tensors.blocks(tensor)), "the same on every host"
    if not size:
        assert found == []
        return
    assert found[0][0] == 1000
    assert sum(found[-1]) == 1000 + size
    longest = max(size // 4, 2 * tensors.STRATUM) + tensors.STRATA
    for (at, count), (following, _unused) in zip(found, found[1:]):
        assert 0 < count <= size
        assert following - (at + count) <= longest
    assert sum(count for _unused, count in found) <= min(size, len(found) * tensors.BLOCK) or size < 10 * tensors.BLOCK


def test_the_places_depend_on_the_name_and_on_nothing_else():
    places = {name: [at - 5 for at, _unused in tensors.blocks(tensors.Tensor(name, 5, 5 + MIB))] for name in ("a", "b")}
    assert places["a"] != places["b"]
    assert places["a"] == [at for at, _unused in tensors.blocks(tensors.Tensor("a", 0, MIB))]
    # Published: whoever changes these numbers changes what every recorded digest of this method means.
    assert places["a"] == [0, 28625, 146629, 369235, 468870, 588847, 697954, 835221, 973554, 1044480]


def test_a_sample_reads_little(tmp_path, later):
    model = tmp_path / "model"
    model.mkdir()
    size = 2**31
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (model / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(model / "m.safetensors", 8 + len(header) + size)
    before = bytes_read()
    manifest = weights.take(str(model), method="sample")
    assert bytes_read() - before < 2 * MIB
    assert manifest.bytes == 8 + len(header) + size
    assert manifest.hashed == 8 + len(header) + (2**31 // tensors.STRATUM + 2) * tensors.BLOCK


def written(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(begin, end) -> bytes:
    return json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [begin, end]}}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not even hold its header"),
        (b"1234567", "does not even hold its header"),
        (written(b"{}", length=3), "does not even hold its header"),
        (written(b"{}", length=2**64 - 1), "does not even hold its header"),
        (written(b""), "no JSON"),
        (written(b"[]"), "no JSON object"),
        (written(b"\xff{}"), "no JSON"),
        (written(b"[" * 100_000), "no JSON"),
        (written(b'{"w": ' + b"1" * 5000 + b"}"), "no JSON"),
        (written(b'{"w": 1}'), "no place for the tensor 'w'"),
        (written(b'{"w": {"data_offsets": [0, true]}}', b"1"), "no place for the tensor 'w'"),
        (written(b'{"w": {"data_offsets": [0, 1.0]}}', b"1"), "no place for the tensor 'w'"),
        (written(b'{"w": {"data_offsets": [0]}}'), "no place for the tensor 'w'"),
        (written(tensor(1, 2), b"12"), "leaves a gap"),
        (written(tensor(-1, 2), b"12"), "leaves a gap"),
        (written(tensor(0, -2), b"12"), "leaves a gap"),
        (written(tensor(0, 3), b"12"), "it is truncated"),
        (written(tensor(0, 10**30), b"12"), "it is truncated"),
        (written(tensor(0, 1), b"12"), "it is longer than that"),
        (written(b'{"w": {"data_offsets": [0, 1]}, "v": {"data_offsets": [0, 1]}}', b"1"), "over another one"),
        (written(b'{"w": {"data_offsets": [0, 1]}, "w": {"data_offsets": [1, 2]}}', b"12"), "occurs twice"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "pointer of Git LFS"),
    ],
)
def test_a_malformed_safetensors_file_is_named(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)
    text = refused(tmp_path / "model.safetensors", method="sample")
    assert f"{tmp_path / 'model.safetensors'} is no whole safetensors file: " in text
    assert says in text
    assert len(text) < 1000
    assert weights.take(str(tmp_path / "model.safetensors")), "its content has a digest all the same"


def test_a_huge_header_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000))
    os.truncate(path, 2**34)
    before = bytes_read()
    assert "the format allows 100000000" in refused(path, method="sample")
    assert bytes_read() - before < MIB


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OFFSETS = st.fixed_dictionaries({"data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2) | JSON})
HEADERS = st.dictionaries(st.text(max_size=3), OFFSETS | JSON, max_size=3).map(lambda value: json.dumps(value).encode())
LENGTHS = st.none() | st.integers(0, 2**64 - 1)


@hypothesis.settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    st.one_of(
        st.binary(max_size=60), st.builds(written, HEADERS | st.binary(max_size=30), st.binary(max_size=9), LENGTHS)
    )
)
def test_whatever_is_in_a_file_it_has_a_digest_or_is_refused(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        manifest = weights.take(str(path), method="sample", remember=False)
    except UsageError as error:
        assert "is no whole safetensors file" in str(error)
        return
    assert manifest.hashed <= len(content) + 2 * len(content)


# Records.


def test_a_record_is_the_manifest(model, host):
    manifest = weights.take(str(model))
    assert weights.recorded(str(model)) is None
    weights.record(manifest)
    assert weights.recorded(str(model)) == manifest
    assert weights.recorded(f"{model}/") == manifest
    for path in (host / "var/lib/vllm/weights").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"files": {}},
        {"files": []},
        {"files": {"a": {"size": 1}}},
        {"digest": "sha256:0"},
        {"method": "half"},
        {"bytes": "many"},
    ],
)
def test_a_record_that_is_not_intact_is_an_error(model, host, change):
    weights.bring(str(model), "recorded")
    (where,) = [path for path in (host / "var/lib/vllm/weights").iterdir() if not path.name.endswith(".hashes.json")]
    where.write_text(json.dumps({**json.loads(where.read_text()), **change}))
    with pytest.raises(UsageError, match=f"{where} is no intact manifest"):
        weights.recorded(str(model))


def test_names_of_any_bytes_survive(model):
    for name in (b"l\xe4tin", "ü".encode(), b"a\nb"):
        (model / os.fsdecode(name)).write_text("x")
    weights.bring(str(model), "recorded")
    assert weights.recorded(str(model)) == weights.take(str(model))


def test_two_checkpoints_of_one_name_have_two_records(tmp_path, model):
    other = build(tmp_path / "b/model", "b")
    for path in (model, other):
        weights.bring(str(path), "recorded")
    assert weights.recorded(str(model)).digest != weights.recorded(str(other)).digest


# What is allowed.


ZERO = f"sha256:{'0' * 64}"


@pytest.fixture
def manifest(model):
    return weights.take(str(model))


def test_allowed_by_a_list(manifest):
    weights.allowed(manifest)
    weights.allowed(manifest, [ZERO, manifest.digest])
    weights.allowed(manifest, [manifest.digest.upper().replace("SHA", "sha")])
    with pytest.raises(
        Refused, match=f"{manifest.digest} .method full., which is none of the 1 allowed in the given"
    ) as no:
        weights.allowed(manifest, [ZERO])
    assert ZERO in str(no.value)
    assert no.value.details["digest"] == manifest.digest


def test_allowed_by_a_file(manifest, tmp_path):
    path = tmp_path / "allowed"
    path.write_text(f"# approved\n\n{ZERO}  base, revision 1\n{manifest.digest}# two\n")
    weights.allowed(manifest, allowed_file=str(path))
    weights.allowed(manifest, [ZERO], str(path))
    path.write_text(f"{ZERO}\n# {manifest.digest}\n")
    with pytest.raises(Refused, match=f"none of the 2 allowed in the given list and {path}"):
        weights.allowed(manifest, [ZERO], str(path))
    weights.allowed(manifest, [manifest.digest], str(path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allowed": ["sha256:12"]}, "the list of allowed digests: 'sha256:12' is no digest"),
        ({"allowed": ["0" * 64]}, "is no digest"),
        ({"allowed": [7]}, "'7' is no digest"),
        ({"allowed_file": "nowhere"}, "cannot read .*nowhere: No such file"),
        ({"allowed_file": "empty"}, "holds no digest"),
        ({"allowed_file": "comments"}, "holds no digest"),
        ({"allowed_file": "binary"}, "cannot read"),
        ({"allowed_file": "words"}, "words: 'all' is no digest"),
        ({"allowed_signers": "signers"}, "without allowed_file"),
        ({"allowed_file": "good", "allowed_signers": "signers"}, "there is no .*good.sig"),
    ],
)
def test_lists_that_are_none(manifest, tmp_path, options, says):
    for name, content in {
        "empty": b"",
        "comments": b"# all\n",
        "binary": b"\xff",
        "words": b"all of them\n",
        "good": manifest.digest.encode(),
        "signers": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    options = {key: value if key == "allowed" else str(tmp_path / value) for key, value in options.items()}
    with pytest.raises(UsageError, match=says):
        weights.allowed(manifest, **options)


def keygen(*arguments, **options):
    subprocess.run(["ssh-keygen", *arguments], check=True, capture_output=True, **options)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    place = tmp_path_factory.mktemp("keys")
    for name in ("chief", "other"):
        keygen("-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(place / name))
    public = (place / "chief.pub").read_text().split()
    (place / "signers").write_text(f"chief@example.org {public[0]} {public[1]}\n")
    return place


@pytest.fixture
def signed(manifest, tmp_path):
    """`signed(key)` is a list with this digest, signed by that key."""

    def sign(key, namespace=weights.NAMESPACE):
        path = tmp_path / "approved"
        path.write_bytes(f"# approved, \u00fc\r\n{manifest.digest}\r\n".encode())
        (tmp_path / "approved.sig").unlink(missing_ok=True)
        keygen("-Y", "sign", "-n", namespace, "-f", str(key), str(path))
        return path

    return sign


def test_a_signed_list(manifest, keys, signed):
    weights.allowed(manifest, (), str(signed(keys / "chief")), str(keys / "signers"))


@pytest.mark.parametrize(
    ("key", "namespace", "spoil"),
    [
        ("other", weights.NAMESPACE, None),
        ("chief", "file", None),
        ("chief", weights.NAMESPACE, "approved"),
        ("chief", weights.NAMESPACE, "approved.sig"),
    ],
)
def test_a_signature_that_is_not_good(manifest, keys, signed, tmp_path, key, namespace, spoil):
    path = signed(keys / key, namespace)
    if spoil:
        with open(tmp_path / spoil, "ab" if spoil == "approved" else "r+b") as stream:
            stream.write(f"{ZERO}\n".encode())
    with pytest.raises(Refused, match=f"{path} has no good signature of anyone in {keys / 'signers'}"):
        weights.allowed(manifest, [manifest.digest], str(path), str(keys / "signers"))


def test_without_ssh_keygen(manifest, keys, signed, monkeypatch, tmp_path):
    path = signed(keys / "chief")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="ssh-keygen, which verifies") as caught:
        weights.allowed(manifest, (), str(path), str(keys / "signers"))
    assert "openssh" in caught.value.next_step
    assert isinstance(caught.value, LifecycleError)
