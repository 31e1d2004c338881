"""The documents are true of the tree: links, names, commands, error texts, and the numbers that code here prints."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import megatron_trees
import pytest
from ports import free_port

import megatron_ep
from megatron_ep.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/gpu/RESULTS.md", "tests/gpu/HISTORY.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# What they say of names and commands holds today; the others tell of earlier versions, or are short.
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [ROOT / "setup.py", *(ROOT / "megatron_ep").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
# Where a name without a folder, or with half of one, may begin.
FOLDERS = (
    "",
    "examples",
    "csrc",
    "csrc/fabric",
    "megatron_ep",
    "megatron_ep/buffer",
    "megatron_ep/fabrics",
    "megatron_ep/meeting",
    "megatron_ep/training",
    "tests/gpu",
    "docs",
    "recipes",
)
NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:h|inl|cu|cpp|py|yaml|txt|sh|md|svg)|(?:[\w.-]+/)+")

# Megatron's and inference engines', and what a run writes.
NOT_HERE = {
    "pretrain_gpt.py",
    "fused_a2a.py",
    "run_ep.py",
    "deepep.py",
    "deepep_ht.py",
    "deepep_ll.py",
    "deepep_v2.py",
    "grouped_fused_moe_ep.py",
    "fused_moe_weight_ep.py",
    "loss.csv",
}

# Names that documents mention and that are other projects'.
ELSEWHERE = {
    "EP_DISABLE_GIN",
    "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "MOE_MODE",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "compare_exchange",
    "deepep",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "do_expand",
    "ft_launcher",
    "ibv_devices",
    "ibv_devinfo",
    "inference_optimized",
    "padding_causal_bottom_right",
}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
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
        folders = [ROOT / folder for folder in FOLDERS]
        found = any((folder / quoted).exists() for folder in folders)
        assert found or any(ROOT.glob(f"csrc/**/{quoted}")), quoted


@by_document
def test_lines_are_wrapped(document: Path) -> None:
    long = [line for line in without_blocks(document.read_text()).splitlines() if len(line) > 120 and line[0] != "|"]
    assert not long


def sources() -> set[str]:
    """Every word of the code: also Megatron's options and CUDA's functions, where they are used."""
    folders = ("csrc", "megatron_ep", "tests", "examples", "recipes")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path != Path(__file__)]
    texts = [
        path for path in files if path.suffix in {".py", ".pyi", ".h", ".inl", ".cu", ".cpp", ".txt", ".sh", ".yaml"}
    ]
    texts += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "setup.py"]
    paths = {word for path in files for word in re.findall(r"\w+", path.name)}
    return paths.union(*(re.findall(r"\w+", path.read_text()) for path in texts))


@pytest.fixture(scope="module")
def words() -> set[str]:
    return sources()


def resolves(name: str) -> bool:
    """Whether a dotted name of ours is a module, or something in one, or a field of a class."""
    value: object = megatron_ep
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part) and isinstance(value, types.ModuleType):
            if importlib.util.find_spec(".".join(parts[:i])) and i == len(parts):
                return True  # without an import: some want another version of Megatron
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:i]))
        if not hasattr(value, part):
            return part in getattr(value, "__annotations__", {})
        value = getattr(value, part)
    return True


@by_page
def test_names_in_backticks_exist(page: Path, words: set[str]) -> None:
    """Names with an underscore, C++ names, and dotted names of ours."""
    text = re.sub(r"^\| DeepEP \|.*?\n\n", "", without_blocks(page.read_text()) + "\n", flags=re.MULTILINE | re.DOTALL)
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if "NAME" in quoted or "/" in quoted or quoted in NOT_HERE:
            continue  # a file: see above
        for word in re.findall(r"\w+", quoted):
            if "_" in word or "::" in quoted:
                assert word in words | ELSEWHERE, quoted
        for name in re.findall(r"\bmegatron_ep(?:\.[A-Za-z]\w*)+", quoted):
            assert resolves(name), quoted


# What stands in front of a block of code that a test does not run from here.
MARK = re.compile(r"<!-- (run by: (?P<test>\S+)|not run: .+) -->\n\Z", re.DOTALL)


def blocks(document: Path) -> Iterator[tuple[str, str, re.Match[str] | None]]:
    """(language, text, mark) of each block of code."""
    text = document.read_text()
    for block in re.finditer(r"^```(\w*|\{.*\})\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        before = text[: block.start()]
        yield block[1], block[2], MARK.search(before[before.rfind("\n\n") + 1 :])


@by_page
def test_blocks_run_or_say_why_not(page: Path) -> None:
    """Python that is not marked runs here, the blocks of a page one after the other; commands have a mark."""
    names: dict[str, object] = {}
    for language, text, mark in blocks(page):
        if mark is not None and mark["test"]:
            test = (ROOT / mark["test"]).read_text()
            for example in re.findall(r"examples/(\w+\.py)", text):
                assert example in test, f"{mark['test']} does not run {example}"
        elif mark is None and language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, str(page), "exec"), names)
        elif mark is None:
            assert language not in ("bash", "sh"), f"without a mark: {text}"


def commands() -> Iterator[tuple[str, str]]:
    """(sub-command, flag) that documents name, as `megatron-ep bench gpus --num-sms 8`."""
    for document in DOCUMENTS:
        for line in re.findall(r"megatron-ep ((?:\w|-)[^`\n]*)", document.read_text()):
            words = line.split("#")[0].split()
            command = " ".join(itertools.takewhile(lambda word: re.fullmatch(r"[a-z][a-z-]*", word), words[:2]))
            yield from ((command, flag) for flag in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words)))


def test_flags_of_commands_exist() -> None:
    found = set(commands())
    assert len(found) > 15
    for command in {command for command, _ in found}:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        flags = {flag for of, flag in found if of == command}
        assert flags <= set(re.findall(r"--[\w-]+", printed.getvalue())), command


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md"])
def test_what_a_newcomer_copies_runs_and_prints(document: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_blocks(document)[0], {})
    assert "output" in printed.getvalue()


@pytest.mark.nightly
@pytest.mark.needs(megatron_trees.LACK)
def test_the_step_that_readme_shows_runs_without_a_gpu() -> None:
    text = (ROOT / "README.md").read_text()
    clone, _, command = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0].partition("\n")
    assert clone.startswith("git clone") and command.count(" pretrain_gpt.py ") == 1
    before, behind = re.findall(r"`(--[^`]+)`", text.partition("Without a GPU add ")[2])[:2]
    command = command.strip().replace(" pretrain_gpt.py ", f" {before} pretrain_gpt.py ") + f" {behind}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=megatron_trees.INSTALLED,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("MoE layers dispatch over 2 ranks (1 x 2, shared memory)") == 1, done.stdout[-4000:]
    assert re.search(r"iteration +10/ +10 .* lm loss: \d", done.stdout), done.stdout[-4000:]


def test_memory_of_a_rank_is_what_its_code_prints() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_blocks("docs/memory.md")[0], {})
    assert printed.getvalue() in (ROOT / "docs/memory.md").read_text()


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


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_site_needs_no_compiler():
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (
        "-m sphinx" in planned and "pip install --no-build-isolation" not in planned and "cmake --build" not in planned
    )
