"""The format of rows in the low-latency mode, in particular float8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ep.buffer.arguments import check_scales
from megatron_ep.buffer.interface import Backend
from megatron_ep.config import require_one_of
from megatron_ep.float8 import SCALES_OF_WORD
from megatron_ep.normal.one_hop import fill_with_zeros
from megatron_ep.reference import SCALE_BLOCK, SCALE_FORMATS

SCALE_LAYOUTS = ("row", "column")
BLOCKS_OF_WORD = SCALES_OF_WORD[torch.int32]


@dataclass
class Float8:
    """The format of rows that are sent as float8_e4m3fn.

    scale_format: one of `reference.SCALE_FORMATS`, for bfloat16 rows that dispatch converts; None: x is float8.
    column: whether received scales are column-major.
    """

    scale_format: str | None
    scale_dtype: torch.dtype
    column: bool

    def new_scales(self, shape: Sequence[int], backend: Backend, *, zero: bool) -> torch.Tensor:
        """Returns scales [*rows, ceil(H / 128)] of rows of this shape, [*rows, H], row-major or column-major."""
        *rows, hidden = shape
        blocks = -(-hidden // SCALE_BLOCK)
        if not self.column:
            scales = backend.new_output((*rows, blocks), self.scale_dtype)
            fill_with_zeros(scales if zero else None)
            return scales
        words, dtype = blocks, torch.float32
        if self.scale_dtype != torch.float32:
            words, dtype = blocks // BLOCKS_OF_WORD, torch.int32
        aligned = aligned_column(rows[-1])
        columns = backend.new_output((*rows[:-1], words, aligned), dtype)
        fill_with_zeros(columns if zero else None)
        columns = columns.transpose(-1, -2)
        return columns if aligned == rows[-1] else columns[..., : rows[-1], :]


def float8_of(
    xs: list[torch.Tensor], fp8: str | None, scales: list[torch.Tensor] | None, scale_layout: str
) -> Float8 | None:
    """Returns the format for the arguments of a dispatch. Raises ValueError for an invalid combination."""
    require_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    if fp8 is not None:
        if fp8 not in SCALE_FORMATS:
            raise ValueError(f"fp8 is {fp8!r}, must be None or one of {', '.join(map(repr, SCALE_FORMATS))}")
        if scales is not None:
            raise ValueError(f"scales must not be given with fp8={fp8!r}, which makes them")
        if xs[0].dtype != torch.bfloat16:
            raise ValueError(f"x is {xs[0].dtype}, must be torch.bfloat16 with fp8={fp8!r}")
        scale_dtype = torch.float8_e8m0fnu if fp8 == "ue8m0" else torch.float32
        float8 = Float8(fp8, scale_dtype, scale_layout == "column")
    else:
        check_scales(xs, scales)
        if scales is None:
            if scale_layout != "row":
                raise ValueError(f"scale_layout is {scale_layout!r}, must be left out where there are no scales")
            return None
        float8 = Float8(None, scales[0].dtype, scale_layout == "column")
    hidden, of_word = xs[0].shape[-1], SCALE_BLOCK * BLOCKS_OF_WORD
    if float8.column and float8.scale_dtype != torch.float32 and hidden % of_word:
        raise ValueError(
            f"x has H = {hidden}, must be a multiple of {of_word} with column-major scales of {float8.scale_dtype}: "
            "four make an int32"
        )
    return float8


def aligned_column(rows: int) -> int:
    """Returns the stride of columns of scales in 4-byte words, a multiple of 16 bytes."""
    return -(-rows // 4) * 4
