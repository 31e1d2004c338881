"""The MoE gate: from router logits to each token's experts and weights, in one kernel, with gradients.

Shapes: T tokens, E experts, K choices of a token. The semantics are those of Megatron-Core's
`topk_routing_with_score_function` and `group_limited_topk` (megatron/core/transformer/moe/moe_utils.py, version 0.19),
made definite where those leave a choice to torch.topk.

Effects of rounding, for logits computed in fp32 (for float64 they are the same with u = 2^-53): An expert is chosen by
its score plus its bias; M is the largest score, or score plus bias, of the token, and u = 2^-24, so that u M is at most
one unit in the last place (ulp) of M. A score is within 4.2 u of its value (an exp within 1.1 ulp, a sum, a quotient),
and adding the bias rounds once more: 6 u M at most. A group's score adds m = K // group_topk of these with m - 1
roundings of at most m u M: m (m + 5) u M at most. Therefore, on every CPU and GPU:

- The choice is exact if the last expert taken and the first one left out are more than 12 ulps of M apart, and the last
  group taken and the first one left out more than 2 m (m + 5), which is 12 for m = 1 and 28 for m = 2.
- In a closer tie any choice between those candidates is right. Megatron-Core's function, whose scores come from torch's
  exp, keeps the same bounds, so the two agree except in near ties; the instruction set decides in which ones.
- A weight is within n + 11 ulps of its value, where n scores are in the sum that divides it; after a softmax, d more
  for a logit that is d below the largest one.
- On the host equal logits of 32 or 16 bits give equal bits on every CPU.

Two runs that differ in any rounding, as Megatron's own dispatchers do, may therefore diverge at a near tie. To compare
their loss curves, replay the choices of one run in the other (`replay_ids`, Megatron's RouterReplay).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from megatron_ep import _C
from megatron_ep.buffer import host
from megatron_ep.config import MAX_EXPERTS, MAX_TOPK, SUMMABLE_TYPES, is_number, require_int

SCORE_FUNCTIONS = ("sigmoid", "softmax")
LOGIT_DTYPES: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in SUMMABLE_TYPES.items()}


class Routing(NamedTuple):
    """What `grouped_topk` returns. "Real" is float64 for float64 logits, else float32.

    ids: int64 [T, K], best score first, -1 where there is no expert. weights: real [T, K], 0 where there is none.
    tokens_per_expert: int64 [E], on the logits' device.
    probs, routing_map: dense form, [T, E]: weights in the logits' dtype, 0 where not chosen, and a bool map; None
        without `dense`.
    aux_scores, aux_map: real and bool [T, E], for the auxiliary loss; None without `aux`.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    tokens_per_expert: torch.Tensor
    probs: torch.Tensor | None
    routing_map: torch.Tensor | None
    aux_scores: torch.Tensor | None
    aux_map: torch.Tensor | None


def grouped_topk(
    logits: torch.Tensor,
    k: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
    score_function: str = "sigmoid",
    expert_bias: torch.Tensor | None = None,
    scaling_factor: float | None = None,
    pre_softmax: bool = False,
    renormalize: bool | None = None,
    padding_mask: torch.Tensor | None = None,
    replay_ids: torch.Tensor | None = None,
    *,
    dense: bool = False,
    aux: bool = False,
) -> Routing:
    """Chooses K experts for each token and weighs them.

    Scores are sigmoid(logits), softmax(logits) over all experts (`pre_softmax`), or the logits themselves. The K best
    of score + expert_bias are chosen; with groups only from the `group_topk` best of `num_groups` equal groups of
    consecutive experts, where a group's score is the sum of its best K // group_topk. The weights are the chosen scores
    without the bias; for logits, their softmax. They are divided by their sum + 1e-20 if K > 1 and `renormalize`, then
    multiplied by `scaling_factor`.

    Among equal scores the lowest id wins, for experts and for groups. NaN counts as larger than +inf, so a NaN logit's
    expert is chosen and shows in the weights, and never leads to an id outside [0, E). Infinite logits give what IEEE
    arithmetic gives: sigmoid 0 or 1; NaN from a softmax over a +inf, or over nothing but -inf.

    Gradients flow from weights, probs and aux_scores to the logits; the bias gets none.

    logits: [T, E] on the CPU or a GPU; float32, bfloat16 and float16 are computed in float32, float64 in float64
        (Megatron computes scores of float64 logits in float32).
    k: K, at most 32 and E.
    num_groups, group_topk: both or neither.
    score_function: "sigmoid" or "softmax".
    expert_bias: float32 [E], for "sigmoid".
    scaling_factor: factor of the weights, of either sign, a normal number in the dtype of computation. None: 1.
    pre_softmax: softmax over all experts before the choice rather than over the chosen ones after it.
    renormalize: None: as in Megatron, True for "sigmoid", False for "softmax" with pre_softmax; without pre_softmax the
        weights sum to 1 anyway.
    padding_mask: bool [T]; tokens where it is True get no expert and are not counted.
    replay_ids: int64 [T, K]: experts to take instead of choosing; -1 for none. An expert that a token repeats is merged
        as in Megatron's dense map: its first place keeps the weight, which is computed as if they were distinct, the
        others become -1, and the gradient of that weight counts for all of them. On a GPU, where the ids are not
        checked on the host, an invalid id stays in `ids`, and the token's weights are NaN.
    dense: also return probs and routing_map.
    aux: also return aux_scores, softmax(logits) or sigmoid(logits) / (their sum + 1e-20), and aux_map, the K largest of
        them; 0 and False for padding. Bias, groups, scaling and replay_ids play no part (Megatron's
        compute_routing_scores_for_aux_loss).

    Raises ValueError for a wrong argument, on a GPU also for an E beyond its shared memory (28,000 on an H200 for
    float32); RuntimeError if logits are on a GPU and this build has no CUDA kernels, and in a backward pass with
    create_graph: the gradient cannot be differentiated again, so a penalty on it would lack the router's part.
    """
    _check_logits(logits, k)
    num_tokens, num_experts = logits.shape
    _check_groups(num_experts, k, num_groups, group_topk)
    _check_scoring(logits.dtype, score_function, pre_softmax, renormalize, scaling_factor)
    if expert_bias is not None:
        if score_function != "sigmoid":
            raise ValueError(f"expert_bias needs score_function 'sigmoid', got {score_function!r}")
        _check_tensor("expert_bias", expert_bias, torch.float32, (num_experts,), logits.device)
    if padding_mask is not None:
        _check_tensor("padding_mask", padding_mask, torch.bool, (num_tokens,), logits.device)
    if replay_ids is not None:
        _check_tensor("replay_ids", replay_ids, torch.int64, (num_tokens, k), logits.device)
        if not replay_ids.is_cuda and ((replay_ids < -1) | (replay_ids >= num_experts)).any():
            wrong = f"from {replay_ids.min()} to {replay_ids.max()}"
            raise ValueError(f"replay_ids has ids {wrong}, must be in [-1, {num_experts})")
    config = _make_config(
        num_experts,
        k,
        num_groups if group_topk else 1,
        group_topk or 1,
        score_function,
        pre_softmax,
        k > 1 and (score_function == "sigmoid" if renormalize is None else renormalize),
        1.0 if scaling_factor is None else scaling_factor,
    )
    return Routing(*_GroupedTopk.apply(logits, expert_bias, padding_mask, replay_ids, config, dense, aux))


class _GroupedTopk(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        padding: torch.Tensor | None,
        replay_ids: torch.Tensor | None,
        config: _C.RouterConfig,
        dense: bool,
        aux: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        logits = logits.resolve_neg().contiguous()
        bias, padding, replay_ids = map(_in_memory, (bias, padding, replay_ids))
        shape, real = logits.shape, torch.promote_types(logits.dtype, torch.float32)
        routing = Routing(
            ids=logits.new_empty(shape[0], config.topk, dtype=torch.int64),
            weights=logits.new_empty(shape[0], config.topk, dtype=real),
            tokens_per_expert=logits.new_empty(shape[1], dtype=torch.int64),
            probs=_new_like(logits) if dense else None,
            routing_map=_new_like(logits, torch.bool) if dense else None,
            aux_scores=_new_like(logits, real) if aux else None,
            aux_map=_new_like(logits, torch.bool) if aux else None,
        )
        given = {"logits": logits, "bias": bias, "padding": padding, "replay_ids": replay_ids}
        _run("router_forward", logits, config, given | routing._asdict())
        ctx.save_for_backward(logits, padding, routing.ids if replay_ids is None else replay_ids)
        ctx.config, ctx.is_replayed = config, replay_ids is not None
        ctx.set_materialize_grads(False)
        counted = (routing.ids, routing.tokens_per_expert, routing.routing_map, routing.aux_map)
        ctx.mark_non_differentiable(*(tensor for tensor in counted if tensor is not None))
        return tuple(routing)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _, grad_weights, _, grad_probs, _, grad_aux_scores, _ = map(_in_memory, grads)
        nothing = (None,) * 6
        if grad_weights is None and grad_probs is None and grad_aux_scores is None:
            return None, *nothing
        if torch.is_grad_enabled():
            raise RuntimeError("grouped_topk has no second derivatives: run the backward pass without create_graph")
        logits, padding, ids = ctx.saved_tensors
        grad_logits = _new_like(logits)
        tensors = {
            "logits": logits,
            "padding": padding,
            "ids": ids,
            "is_replayed": ctx.is_replayed,
            "grad_weights": grad_weights,
            "grad_probs": grad_probs,
            "grad_aux_scores": grad_aux_scores,
            "grad_logits": grad_logits,
        }
        _run("router_backward", logits, ctx.config, tensors)
        return grad_logits, *nothing


def _new_like(logits: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised, contiguous [T, E]."""
    if logits.device.type == "cpu":
        return host.new_output(logits.shape, dtype or logits.dtype)
    return torch.empty_like(logits, dtype=dtype)


def _in_memory(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.resolve_neg().contiguous()


def _run(function: str, logits: torch.Tensor, config: _C.RouterConfig, tensors: dict[str, Any]) -> None:
    tensors |= {"tokens": logits.shape[0], "dtype": LOGIT_DTYPES[logits.dtype]}
    if not logits.is_cuda:
        getattr(_C, f"{function}_host")(config, tensors, torch.get_num_threads())
        return
    with torch.cuda.device(logits.device):
        getattr(_C, f"{function}_cuda")(config, tensors, torch.cuda.current_stream().cuda_stream)


@functools.lru_cache(maxsize=256)
def _make_config(
    num_experts: int,
    k: int,
    num_groups: int,
    group_topk: int,
    score_function: str,
    pre_softmax: bool,
    renormalize: bool,
    scaling_factor: float,
) -> _C.RouterConfig:
    if score_function == "sigmoid":
        score = _C.ScoreFunction.SIGMOID
    else:
        score = _C.ScoreFunction.PRE_SOFTMAX if pre_softmax else _C.ScoreFunction.POST_SOFTMAX
    return _C.RouterConfig(
        experts=num_experts,
        topk=k,
        groups=num_groups,
        group_topk=group_topk,
        score=score,
        renormalize=renormalize and score != _C.ScoreFunction.POST_SOFTMAX,
        scaling_factor=scaling_factor,
    )


def _check_logits(logits: torch.Tensor, k: int) -> None:
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"logits is {type(logits).__name__}, must be a tensor [T, E]")
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}, must have 2 dimensions [T, E]")
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits has dtype {logits.dtype}, must be one of {', '.join(map(str, LOGIT_DTYPES))}")
    if logits.device.type not in ("cpu", "cuda"):
        raise ValueError(f"logits is on {logits.device}, must be on the CPU or a CUDA device")
    if logits.is_cuda and not hasattr(_C, "router_forward_cuda"):
        raise RuntimeError("logits is on a GPU, but this build of megatron_ep has no CUDA kernels (megatron-ep env)")
    if logits.shape[1] > MAX_EXPERTS:
        raise ValueError(f"logits has {logits.shape[1]} experts, must have at most {MAX_EXPERTS}")
    require_int("k", k, 1, min(MAX_TOPK, logits.shape[1]))


def _check_groups(num_experts: int, k: int, num_groups: int | None, group_topk: int | None) -> None:
    if (num_groups is None) != (group_topk is None):
        raise ValueError(f"num_groups is {num_groups} and group_topk {group_topk}: give both or neither")
    if num_groups is None or group_topk is None:
        return
    require_int("num_groups", num_groups, 1, num_experts)
    require_int("group_topk", group_topk, 1, num_groups)
    if num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}, must divide the {num_experts} experts of logits")
    if group_topk > k:
        raise ValueError(f"group_topk is {group_topk}, must be at most k, which is {k}")
    group_size = num_experts // num_groups
    if k > group_topk * group_size:
        raise ValueError(f"k is {k}, but {group_topk} groups of {group_size} have {group_topk * group_size} experts")


def _check_scoring(
    dtype: torch.dtype,
    score_function: str,
    pre_softmax: bool,
    renormalize: bool | None,
    scaling_factor: float | None,
) -> None:
    """Raises ValueError for a wrong combination. dtype: dtype of the logits."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function is {score_function!r}, must be one of {', '.join(SCORE_FUNCTIONS)}")
    if not isinstance(pre_softmax, bool):
        raise ValueError(f"pre_softmax is {pre_softmax!r}, must be a bool")
    if renormalize is not None and not isinstance(renormalize, bool):
        raise ValueError(f"renormalize is {renormalize!r}, must be a bool or None")
    if pre_softmax and score_function != "softmax":
        raise ValueError(f"pre_softmax needs score_function 'softmax', got {score_function!r}")
    if renormalize is False and score_function == "softmax" and not pre_softmax:
        raise ValueError(
            "renormalize is False, but a softmax over the chosen experts always sums to 1: use pre_softmax"
        )
    if scaling_factor is None:
        return
    real = torch.finfo(torch.promote_types(dtype, torch.float32))
    if not is_number(scaling_factor) or not real.tiny <= abs(scaling_factor) <= real.max:
        raise ValueError(
            f"scaling_factor is {scaling_factor!r}, must be a number of size {real.tiny:.1e} to {real.max:.1e}, in "
            f"which logits of {dtype} are computed"
        )


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}, must be a tensor, {dtype} {shape} on {device}")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, must be {dtype} {shape} on {device}"
        )
