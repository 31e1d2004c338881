"""Describes how the calls of ranks differ after one of them received a row of another call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ep.diagnosis.blame import RankStatus, counter_of, named

# Name and bytes of each element type, by its number in `megatron_ep.config.ELEMENT_TYPES`.
DTYPES = {0: ("bfloat16", 2), 1: ("float16", 2), 2: ("float32", 4), 3: ("float64", 8), 4: ("float8_e4m3fn", 1)}
WEIGHTS = {4: "float32", 8: "float64"}
SCALES = {1: "float8_e8m0fnu", 4: "float32"}
UNKNOWN = "what the others sent is not known here"
CALLS_KNOWN_APART = 1 << 16  # csrc/core/sends.h


def what_ranks_sent(rank: int, statuses: Sequence[RankStatus], world_size: int) -> str:
    """Returns a clause that says what each rank sent in the call in which this rank received a row of another call.

    statuses: status of each reachable rank.
    """
    incidents = [i for s in statuses if s.rank == rank for i in s.incidents if i["outcome"] == "mismatch"]
    if not incidents:
        return UNKNOWN
    counter, call = counter_of(incidents[0]["role"]), incidents[0]["call"]
    ranks_by_text: dict[str, list[int]] = {}
    for status in statuses:
        for sent in status.sends:
            if sent["counter"] == counter and sent["call"] == call % CALLS_KNOWN_APART:
                ranks_by_text.setdefault(_text(sent), []).append(status.rank)
    parts = [f"{named(ranks)} sent {text}" for text, ranks in ranks_by_text.items()]
    if len(parts) < 2 and sum(map(len, ranks_by_text.values())) < world_size:
        parts.append(UNKNOWN)
    elif len(parts) == 1:
        text = next(iter(ranks_by_text))
        by = "by different plans" if "by a plan" in text else "with the handles of different dispatches"
        parts = [f"all sent {text}, but {by}"]
    return f"in call {call} {'; '.join(parts)}"


def _text(sent: Mapping[str, Any]) -> str:
    dtype, itemsize = DTYPES.get(sent["payload_type"], ("unknown", 1))
    text = f"a {sent['kind']}, H = {sent['payload_bytes'] // itemsize}, {dtype}, K = {sent['topk']}"
    if sent["scale_bytes"]:
        text += f", scales of {SCALES.get(sent['scale_bytes'], 'another number or type')}"
    if sent["weight_bytes"]:
        of = "weights" if "dispatch" in sent["kind"] else "gradients of weights"
        return f"{text}, {of} of {WEIGHTS.get(sent['weight_bytes'], 'unknown')}"
    return text
