"""Random cases of which a third runs at each change, and all of them in the nightly tests."""

from collections.abc import Iterable

import pytest


def a_third(values: Iterable[int]) -> list:
    return [pytest.param(value, marks=pytest.mark.nightly if number % 3 else ()) for number, value in enumerate(values)]
