"""A progress bar of simulations on a terminal."""

from __future__ import annotations

import sys

from rich import progress
from rich.console import Console

from megatron_ep.tools.simulate.predict import OnProgress


class Progress:
    """A progress bar, a context manager. phases: number of phases that are simulated, without notify."""

    def __init__(self, title: str, phases: int) -> None:
        self._bar = progress.Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(title, total=float(phases))
        self._done, self._last = 0.0, ("", 0.0)

    def __enter__(self) -> OnProgress:
        self._bar.start()
        return self._on_progress

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _on_progress(self, phase: str, part: float) -> None:
        if phase == "notify":
            return
        if self._last[0] and (phase != self._last[0] or part < self._last[1]):
            self._done += 1
        self._last = (phase, part)
        self._bar.update(self._task, completed=self._done + part)
