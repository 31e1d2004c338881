"""Tests whose body runs on started ranks."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def run_on(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test: all ranks of a fixture, of type LocalRanks, run its body at once.

    The body's arguments are fixtures and parameters of the test, and are pickled.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            arguments.pop(fixture).run(_call, body.__module__, body.__name__, arguments)

        parameters = inspect.signature(body).parameters.values()
        ranks = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *parameters])  # type: ignore[attr-defined]
        return test

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
