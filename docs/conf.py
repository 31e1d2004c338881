"""The site that `make docs` builds: the documents of this repository, and the API from its docstrings."""

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import tomllib

ROOT = Path(__file__).parents[1]
# The extension need not be compiled: no page shows what is in it.
sys.path.insert(0, str(ROOT))
sys.modules |= {"megatron_ep._C": MagicMock(), "megatron_ep._simulate": MagicMock()}

project = "megatron_ep"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# The source folder is the repository itself, so that a link means the same here and in a checkout.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "tests/gpu/RESULTS.md"]
exclude_patterns = [".venv", "build", "runs", "dist", "docs/templates"]
root_doc = "docs/index"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
html_theme = "furo"
html_title = "megatron_ep"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
toc_object_entries_show_parents = "hide"
html_show_copyright = False
html_show_sphinx = False

ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")
QUOTED = re.compile(r"(`[^`]+`)")


def restructured(text: str) -> str:
    """Our docstrings are plain text with names in backticks."""
    parts = QUOTED.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            escaped = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
            parts[i] = re.sub(r"\b(docs/\w+)\.md", r":doc:`/\1`", escaped)
        elif re.fullmatch(r"`[A-Za-z_][\w.]*`", part):
            parts[i] = f":py:obj:{part}"
        else:
            parts[i] = f"`{part}`"
    return "".join(parts)


def rewrite_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A line `name: what it is` is an argument or a field, and becomes an entry of a definition list."""
    out: list[str] = []
    for line in lines:
        match = ARGUMENT.fullmatch(line)
        if match:
            if out and out[-1]:
                out.append("")
            out += [f"``{match[1]}``", "    " + restructured(match[2])]
            continue
        if out and line and not line.startswith(" ") and out[-1].startswith("    "):
            out.append("")
        out.append(restructured(line))
    lines[:] = [*out, ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", rewrite_docstring)
