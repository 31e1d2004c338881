"""How many lines a part of the product may have: whoever adds a capability says in line_budget.txt what it replaces."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".pyi", ".h", ".inl", ".cpp", ".cu", ".in"}
BUDGET = dict(line.rsplit(maxsplit=1) for line in (Path(__file__).parent / "line_budget.txt").read_text().splitlines())


def parts() -> dict[str, int]:
    """Lines of each folder of csrc and megatron_ep, and of the files directly in megatron_ep."""
    found: dict[str, int] = {}
    for top in ("csrc", "megatron_ep"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in SUFFIXES:
                part = "/".join(path.relative_to(ROOT).parts[:2]) if path.parent != ROOT / top else top
                found[part] = found.get(part, 0) + len(path.read_text().splitlines())
    return found


@pytest.mark.parametrize("part", sorted(parts()))
def test_a_part_keeps_to_its_budget(part: str) -> None:
    assert part in BUDGET, f"{part} has no line in tests/packaging/line_budget.txt"
    assert parts()[part] <= int(BUDGET[part]), f"{part} has {parts()[part]} lines, its budget is {BUDGET[part]}"


def test_every_budget_is_of_a_part() -> None:
    assert BUDGET.keys() == parts().keys()
