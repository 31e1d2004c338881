"""What ranks say of rows that were not meant for their call."""

import torch

from megatron_ep.config import ELEMENT_TYPES
from megatron_ep.diagnosis import disagreement


def test_element_types_have_the_numbers_that_travel():
    types = {number: (name, getattr(torch, name).itemsize) for name, number in ELEMENT_TYPES.items()}
    assert types == disagreement.DTYPES
