"""What of many cases runs at each change; the nightly tests run all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(*values: Any) -> Any:
    """A case of `parametrize` for the nightly tests alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def a_third(values: Iterable[int]) -> list[Any]:
    return [at_night(value) if number % 3 else value for number, value in enumerate(values)]
