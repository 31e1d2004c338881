"""The documents are true of the tree: links, names, commands, error texts, and the numbers that code here prints."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [ROOT / "setup.py", *(ROOT / "megatron_ep").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
# Where a name without a folder, or with half of one, may begin.
ROOMS = (
    "",
    "csrc",
    "csrc/fabric",
    "megatron_ep",
    "megatron_ep/backends",
    "megatron_ep/training",
    "tests/gpu",
    "docs",
    "recipes",
)
NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:h|inl|cu|cpp|py|yaml|txt|sh|md|svg)|(?:[\w.-]+/)+")

NOT_HERE = {"pretrain_gpt.py", "loss.csv", "loss.png"}  # Megatron-LM's, and what a run writes

by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """GitHub's names for the headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


@by_document
def test_files_that_are_named_exist(document: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", without_blocks(document.read_text())):
        if not NAME.fullmatch(quoted) or "NAME" in quoted or quoted in NOT_HERE:
            continue
        folders = [ROOT / room for room in ROOMS]
        found = any((folder / quoted).exists() for folder in folders)
        assert found or any(ROOT.glob(f"csrc/**/{quoted}")), quoted


@by_document
def test_lines_are_wrapped(document: Path) -> None:
    long = [line for line in without_blocks(document.read_text()).splitlines() if len(line) > 120 and line[0] != "|"]
    assert not long


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def test_what_readme_shows_runs() -> None:
    exec(python_blocks("README.md")[0], {})


def test_memory_of_a_rank_is_what_its_code_prints() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_blocks("docs/tuning.md")[0], {})
    assert printed.getvalue() in (ROOT / "docs/tuning.md").read_text()


def messages() -> str:
    """All sources as one text, in which a string that is written in parts is whole."""
    text = "\n".join(path.read_text() for path in SOURCES if path.is_file())
    return re.sub(r'"\s*\+?\s*f?"', "", text)


def quoted_errors() -> Iterator[str]:
    """What stands in the first column of troubleshooting's tables, without the values."""
    for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines():
        if line.startswith("|"):
            for quoted in re.findall(r"`([^`]+)`", line.split("|")[1]):
                yield from (part.strip(" ,:") for part in quoted.split("…"))


def test_errors_that_are_explained_exist() -> None:
    said = messages()
    missing = [part for part in quoted_errors() if part not in said]
    assert not missing
