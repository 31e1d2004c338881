"""A progress bar of simulations on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich import progress
from rich.console import Console

from megatron_ep.tools.simulate.predict import OnProgress


@contextlib.contextmanager
def shown(title: str) -> Iterator[OnProgress]:
    """Shows how far each phase has come, one after the other."""
    with progress.Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda phase, part: bar.update(task, description=f"{title}, {phase}", completed=part)
