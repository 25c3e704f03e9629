"""Real documents to pack: the text files that Python itself installs, as bytes.

Which files are taken, and in which order, depends on the installation and the arguments alone, so
every rank packs for itself and all come to the same batch.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

SUFFIXES = (".py", ".txt")
NOT_PYTHONS_OWN = {"site-packages", "dist-packages", "__pycache__"}

SHORTER_DOCUMENTS = 39
"""How many documents `pack_tokens` aims for beside the long one and the one that fills up."""
SPREAD = 64
"""The longest of them is aimed at this many times the shortest."""

File = tuple[int, str]  # size in bytes and name, the sort key of all choices


@dataclass(frozen=True)
class Document:
    """The first `len(text)` bytes of one file."""

    name: str
    """path below the standard library's folder, with forward slashes"""
    text: bytes
    file_bytes: int
    """the file's own length"""

    @property
    def cut(self) -> bool:
        """Whether the document is shorter than its file."""
        return len(self.text) < self.file_bytes


def boundaries(documents: Sequence[Document]) -> list[int]:
    """The cu_seqlens of the documents packed in one row, a byte a token."""
    return list(accumulate((len(d.text) for d in documents), initial=0))


def pack_tokens(tokens: int, shard: int) -> list[Document]:
    """Choose documents of exactly `tokens` bytes in all.

    One document is longer than two shards where that leaves room for others (then some rank holds
    only its middle), and longer than one shard where a file and the total allow it; the others are
    of many lengths, evenly spread on a logarithmic scale. They come in the order of their names
    and with their true lengths, except for the last one, which is cut to fill the total.

    Args:
        tokens: bytes in all, at least 1.
        shard: tokens of the largest shard.

    Raises:
        ValueError: the installed files do not hold that many bytes.
    """
    free = list(_files())
    held = sum(size for size, _ in free)
    if tokens > held:
        raise ValueError(f"--tokens: Python's text files hold {held} bytes, got {tokens}")
    goal = min(2 * shard + 1, tokens // 2 + 1)
    chosen = [_take_at_least(free, goal) or free.pop()]
    if chosen[0][0] > tokens:  # no file between the goal and the total
        chosen = []
    left = tokens - sum(size for size, _ in chosen)
    weights = [SPREAD ** (i / (SHORTER_DOCUMENTS - 1)) for i in range(SHORTER_DOCUMENTS)]
    for i, weight in enumerate(weights):
        file = _take_at_most(free, int(left * weight / sum(weights[i:])))
        if file is None and free and free[0][0] <= left:
            file = free.pop(0)  # an installation without tests has few files this short
        if file is not None:
            chosen.append(file)
            left -= file[0]
    while free and left > free[-1][0]:
        chosen.append(free.pop())
        left -= chosen[-1][0]
    documents = [_read(name, size) for size, name in sorted(chosen, key=lambda file: file[1])]
    if left:
        filler = _take_at_least(free, left)
        assert filler is not None, "some free file is as long as what is left"
        documents.append(_read(filler[1], left))
    return documents


def pack_lengths(lengths: Sequence[int]) -> list[Document]:
    """Cut one file to each of the given lengths: the shortest free one that is long enough.

    Raises:
        ValueError: no free file is long enough.
    """
    free = list(_files())
    documents = []
    for length in lengths:
        file = _take_at_least(free, max(length, 1))
        if file is None:
            raise ValueError(f"--lengths: none of Python's text files left has {length} bytes")
        documents.append(_read(file[1], length))
    return documents


def _folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@cache
def _files() -> tuple[File, ...]:
    """All text files but the empty ones, by size and name."""
    folder, files = _folder(), []
    for where, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in NOT_PYTHONS_OWN]
        for path in (Path(where, name) for name in names if name.endswith(SUFFIXES)):
            files.append((path.stat().st_size, path.relative_to(folder).as_posix()))
    return tuple(sorted(file for file in files if file[0]))


def _take_at_least(free: list[File], size: int) -> File | None:
    index = bisect_left(free, (size, ""))
    return free.pop(index) if index < len(free) else None


def _take_at_most(free: list[File], size: int) -> File | None:
    index = bisect_left(free, (size + 1, "")) - 1
    return free.pop(index) if index >= 0 else None


def _read(name: str, length: int) -> Document:
    content = _folder().joinpath(name).read_bytes()
    return Document(name, content[:length], len(content))
