# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Safetensors files: their header, and a digest over a sample of every tensor.

A file is the header's length (8 bytes, little-endian), the header (JSON: for each tensor its place in the data), and
the data. Nothing in it is trusted: a header is at most ``MAX_HEADER`` bytes, and its tensors lie one after the other
from the first to the last byte of the data, or the file is malformed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import typing as t

MAX_HEADER = 100_000_000  # the format's own limit
LFS_POINTER = b"version https://git-lfs"

# What the digest of a sample means; another number or another key is another method.
BLOCK = 4096
STRATA = 8
STRATUM = 16 * 1024 * 1024
KEY = b"baremetal.vllm weights sample 1"


class Malformed(Exception):
    """Why this is no safetensors file."""


class Tensor(t.NamedTuple):
    """``start`` and ``end`` are counted from the first byte of the file."""

    name: str
    start: int
    end: int


def _is_count(value: t.Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_header(descriptor: int, size: int) -> tuple[bytes, list[Tensor]]:
    """The header's bytes with its length before it, and its tensors in the order of their data.

    :param size: of the file, in bytes.
    :raises Malformed: names what is wrong.
    """
    prefix = os.pread(descriptor, len(LFS_POINTER), 0)
    if prefix == LFS_POINTER:
        raise Malformed("it is a pointer of Git LFS, not the file itself")
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length > size - 8:
        raise Malformed(f"it has {size} bytes, which does not even hold its header")
    if length > MAX_HEADER:
        raise Malformed(f"its header says it has {length} bytes, the format allows {MAX_HEADER}")
    raw = read_exactly(descriptor, 0, 8 + length)
    return raw, _tensors(raw[8:], 8 + length, size)


def _tensors(text: bytes, data: int, size: int) -> list[Tensor]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise Malformed(f"its header is no JSON: {str(exc)[:200]}") from exc
    if not isinstance(header, dict):
        raise Malformed("its header is no JSON object")
    tensors = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(one) for one in offsets)):
            raise Malformed(f"its header gives no place for the tensor {name[:100]!r}")
        tensors.append(Tensor(name, data + offsets[0], data + offsets[1]))
    tensors.sort(key=lambda one: (one.start, one.end))
    end = data
    for tensor in tensors:
        if tensor.start != end or tensor.end < tensor.start:
            raise Malformed(f"the tensor {tensor.name[:100]!r} leaves a gap, or lies over another one")
        end = tensor.end
    if end != size:
        state = "truncated" if size < end else "longer than that"
        raise Malformed(f"it has {size} bytes, its header describes {end}: it is {state}")
    return tensors


def _unique(pairs: list[tuple[str, t.Any]]) -> dict[str, t.Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice")
    return value


def blocks(tensor: Tensor) -> t.Iterator[tuple[int, int]]:
    """Where to read, as (offset in the file, bytes): one block in each stratum of the tensor, or all of a small one.

    The first and the last block are always among them. The others depend on the tensor's name and size alone, so that
    every host reads the same ones.
    """
    size = tensor.end - tensor.start
    count = max(STRATA, -(-size // STRATUM))
    if size <= count * BLOCK:
        if size:
            yield tensor.start, size
        return
    yield tensor.start, BLOCK
    seed = tensor.name.encode("utf-8", "surrogatepass")
    drawn = b""
    for index in range(count):
        if not drawn:
            drawn = hmac.digest(KEY, b"%d %d " % (size, index) + seed, "sha256")
        begin, end = size * index // count, size * (index + 1) // count
        at = begin + int.from_bytes(drawn[:8], "big") % (end - begin - BLOCK + 1)
        drawn = drawn[8:]
        yield tensor.start + at, BLOCK
    yield tensor.end - BLOCK, BLOCK


def sample(descriptor: int, size: int, seen: t.Callable[[int], None]) -> str:
    """SHA-256 (hex) over the file's size, its header and the blocks of every tensor.

    :param seen: called with the number of bytes after every tensor; what it raises ends the work.
    :raises Malformed: this is no safetensors file.
    """
    raw, tensors = read_header(descriptor, size)
    digest = hashlib.sha256(b"%d\n" % size + raw)
    seen(len(raw))
    for tensor in tensors:
        read = 0
        for offset, count in blocks(tensor):
            digest.update(read_exactly(descriptor, offset, count))
            read += count
        seen(read)
    return digest.hexdigest()


def read_exactly(descriptor: int, offset: int, count: int) -> bytes:
    """
    :raises Malformed: the file ends before.
    """
    parts = []
    while count:
        part = os.pread(descriptor, count, offset)
        if not part:
            raise Malformed(f"it ends at byte {offset}, while it is read")
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)
