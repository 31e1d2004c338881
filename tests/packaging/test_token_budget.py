"""How much code a part of the product may have (token_budget.txt). `python test_token_budget.py` prints what it has."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = [line.split() for line in (Path(__file__).parent / "token_budget.txt").read_text().splitlines()]
BUDGET = {line[0]: line[1:] for line in LINES if line and line[0] != "#"}
SLACK = 1.02  # of a limit over its aim
CPP = {".h", ".inl", ".cpp", ".cu", ".in"}
CPP_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|\.?\d[\w.']*"""
    r"""|<<=|>>=|->|::|\+\+|--|&&|\|\||[-+*/%&|^!=<>]=|<<|>>|\S""",
    re.DOTALL,
)
FREE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens(path: Path) -> int:
    text = path.read_text()
    if path.suffix in CPP:
        return sum(not match["comment"] for match in CPP_TOKEN.finditer(text))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset) for node in nodes if ast.get_docstring(node) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in FREE and token.start not in docstrings for token in found)


def parts() -> dict[str, int]:
    """Tokens of each part."""
    found = dict.fromkeys(BUDGET, 0)
    files = {
        path
        for top in ("csrc", "megatron_ep")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {*CPP, ".py", ".pyi"}
    }
    for name, (_, _, *places) in BUDGET.items():
        own = {
            path for place in places for top in ROOT.glob(place) for path in files if path == top or top in path.parents
        }
        found[name] = sum(map(tokens, own))
        files -= own
    assert not files, "every file is of a part"
    return found


@pytest.mark.parametrize("part", BUDGET)
def test_a_part_keeps_to_its_budget(part: str) -> None:
    limit, aim, has = int(BUDGET[part][0]), int(BUDGET[part][1]), parts()[part]
    assert has <= limit, f"{part} has {has} tokens, its limit in tests/packaging/token_budget.txt is {limit}"
    assert limit <= max(aim, SLACK * has), f"{part} has {has} tokens: lower its limit of {limit}"


if __name__ == "__main__":
    for part, has in parts().items():
        print(f"{part:10} {has:7} tokens, limit {BUDGET[part][0]}, aim {BUDGET[part][1]}")
