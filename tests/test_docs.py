"""The documentation says what the code does: its python blocks run, its links and pictures hold.

The derivation is run from top to bottom in one namespace, so a block may use what an earlier one
defines. A block of the front page is what a reader copies: it runs alone.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kda_cp", "comm", "launch")
PAGES = (
    "README.md",
    "docs/README.md",
    "docs/algorithm.md",
    *(f"{folder}/README.md" for folder in FOLDERS),
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def python_blocks(page: str, text: str) -> list[CodeType]:
    """Compile the page's python blocks; a traceback shows the page's name and line."""
    blocks = []
    for found in FENCE.finditer(text):
        if found[1] == "python":
            line = text.count("\n", 0, found.start(2))
            blocks.append(compile("\n" * line + found[2], str(ROOT / page), "exec"))
    return blocks


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page whose file, or heading in a page of ours, does not exist."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and anchor not in anchors(text if not name else target.read_text("utf-8"))
        ):
            broken.append(link)
    return broken


@pytest.fixture
def torch_defaults() -> Iterator[None]:
    """Put back what a page may set for its readers."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example may ask whether torchrun started it."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def test_the_derivation_runs_from_top_to_bottom(torch_defaults: None, no_torchrun: None):
    page = "docs/algorithm.md"
    blocks = python_blocks(page, (ROOT / page).read_text("utf-8"))
    assert blocks
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(block, namespace)


def test_every_block_of_the_front_page_runs_alone(torch_defaults: None, no_torchrun: None):
    blocks = python_blocks("README.md", (ROOT / "README.md").read_text("utf-8"))
    assert blocks
    for block in blocks:
        exec(block, {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_exist(page: str):
    assert broken_links(ROOT / page, (ROOT / page).read_text("utf-8")) == []


def test_docs_front_page_lists_every_page():
    docs = ROOT / "docs"
    front = (docs / "README.md").read_text("utf-8")
    pages = {path.name for path in docs.glob("*.md")} - {"README.md"}
    assert pages <= set(LINK.findall(front))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_s_page_lists_its_files(folder: str):
    page = (ROOT / folder / "README.md").read_text("utf-8")
    first_cells = "\n".join(re.findall(r"^\|(.*?)\|", page, re.MULTILINE))
    files = {path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if name not in first_cells} == set()


@pytest.mark.parametrize(("ranks", "status"), [("0", 2), ("-1", 2), ("two", 2), ("3", 9)])
def test_quickstart_refuses_what_is_no_number_of_ranks(ranks: str, status: int, tmp_path: Path):
    # An environment whose python ends with 9: nothing is installed, nothing runs.
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch/quickstart.sh"],
        env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path), "RANKS": ranks},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == status
    if status == 2:
        complaint = f"RANKS: expected an integer of at least 1, got '{ranks}'\n"
        assert (done.stdout, done.stderr) == ("", complaint)


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/pictures/draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    pictures = draw.pictures()
    assert set(pictures) == set((ROOT / "docs/pictures").glob("*.svg"))
    for path, text in pictures.items():
        assert path.read_text("utf-8") == text, path


@pytest.mark.slow
def test_readme_example_runs_under_torchrun(tmp_path: Path):
    text = (ROOT / "README.md").read_text("utf-8")
    example = next(found[2] for found in FENCE.finditer(text) if found[1] == "python")
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*torchrun, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line[:6] for line in done.stdout.splitlines()) == ["rank 0", "rank 1", "rank 2"]


# The checks themselves can fail.


def test_a_failing_block_is_reported_at_its_line():
    block = python_blocks("page.md", "text\n\n```python\nassert 1 == 1\nassert 1 == 2\n```\n")[0]
    with pytest.raises(AssertionError) as caught:
        exec(block, {})
    assert caught.traceback[-1].lineno + 1 == 5


def test_broken_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# One head\n", encoding="utf-8")
    text = "# One head\n[a](page.md) [b](gone.md) [c](#one-head) [d](#two) [e](https://x.y)"
    text += " [f](page.md#one-head) [g](page.md#two)\n```\n[h](code.md)\n```\n"
    assert broken_links(page, text) == ["gone.md", "#two", "page.md#two"]
