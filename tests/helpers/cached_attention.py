"""What Megatron's static engine takes from flash-attn for decoding in CUDA graphs, in plain torch: no wait of the host,
and shapes that do not depend on how long the sequences are.

B sequences, S new tokens of each, M the longest a sequence gets, N heads and G groups of them, D elements of a head.
"""

import contextlib
from unittest import mock

import torch


def apply_rotary_emb(x, cos, sin, interleaved=False):
    """x [B, S, N, D] rotated by the angles of its S positions, [S, D / 2]; the halves of a head belong together."""
    assert not interleaved
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def flash_attn_with_kvcache(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, rotary_interleaved):
    """Attention of one new token of each sequence, q [B, 1, N, D] and k, v [B, 1, G, D], whose keys and values are
    added to the caches [B, M, G, D] at cache_seqlens [B]."""
    at = cache_seqlens.long()
    if rotary_cos is not None:
        cos, sin = rotary_cos[at].unsqueeze(1), rotary_sin[at].unsqueeze(1)
        q, k = (apply_rotary_emb(part, cos, sin, rotary_interleaved) for part in (q, k))
    sequences = torch.arange(len(at), device=at.device)
    k_cache[sequences, at], v_cache[sequences, at] = k[:, 0], v[:, 0]
    keys, values = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k_cache, v_cache))
    scores = torch.einsum("bsnd,bmnd->bnsm", q, keys).float() / q.shape[-1] ** 0.5
    is_later = torch.arange(keys.shape[1], device=at.device) > at.view(-1, 1, 1, 1)
    shares = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1).to(q.dtype)
    return torch.einsum("bnsm,bmnd->bsnd", shares, values.masked_fill(is_later.view(len(at), -1, 1, 1), 0))


@contextlib.contextmanager
def installed():
    """In place of flash-attn, which may be there or not."""
    attention = "megatron.core.transformer.attention.flash_attn_with_kvcache"
    rotary = "megatron.core.models.common.embeddings.rope_utils.apply_rotary_emb_flash"
    with mock.patch(attention, flash_attn_with_kvcache), mock.patch(rotary, apply_rotary_emb):
        yield
