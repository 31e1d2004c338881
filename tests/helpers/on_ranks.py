"""Tests that every rank runs: processes that stay up are given the test's name and its parameters, pickled."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def on_ranks(test: Callable[..., None], fixture: str = "ranks") -> Callable[..., None]:
    """The test as the processes of this fixture run it."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        arguments.pop(fixture).run(_run, test.__module__, test.__name__, arguments)

    signature = inspect.signature(test)
    processes = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = signature.replace(parameters=[processes, *signature.parameters.values()])  # type: ignore[attr-defined]
    return run


on_four_ranks = functools.partial(on_ranks, fixture="four_ranks")


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
