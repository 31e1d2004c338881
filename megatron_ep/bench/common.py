"""What the benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def write_json(path: Path | None, records: Sequence[dict[str, Any]]) -> None:
    """All measurements so far, if they are wanted in a file."""
    if path is not None:
        path.write_text(json.dumps(records, indent=2) + "\n")
