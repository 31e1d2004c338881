"""Megatron-Core's token dispatcher interface, implemented with `megatron_ep.dispatch` and `megatron_ep.combine`.

T tokens on this rank, H hidden, E experts, K choices per token, TP ranks that share an expert, L local experts, R rows
received. The group has EP x TP ranks, EP-major. Each TP rank has a slice of its experts, so that a choice becomes TP
choices, and combine sums the partial outputs of the slices.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import pad

import megatron_ep as ep
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS, MAX_TOPK
from megatron_ep.megatron import fp8_rows
from megatron_ep.megatron.announce import announce, count_layer
from megatron_ep.megatron.flags import REFUSED_VALUES, declares_grouped, field_of, num_sms_of
from megatron_ep.megatron.options import Options
from megatron_ep.megatron.replays import Choice, Layout, LostChoices, Replays, unread_combine, weights_of
from megatron_ep.megatron.shared_buffers import (
    abort_peers_on_error,
    close_buffers,
    comm_seconds,
    configure,
    expect,
    options_for,
    release_buffers,
    shared_buffer,
)
from megatron_ep.megatron.step_state import StepState, check_overlap
from megatron_ep.megatron.topk_choices import choices_of, replicated
from megatron_ep.normal.row_limit import RowLimit, clear_behind, counts_within

__all__ = ["EPTokenDispatcher", "configure", "close_buffers", "release_buffers", "comm_seconds"]

COUNTED_ELEMENTS = 8  # of a row that is sent only for the counts
# From 0.20 on Megatron's all-to-all keeps the order in which its inference sums.
HAS_INVARIANT_SUMS = find_spec("megatron.core.transformer.moe.batch_invariant") is not None
OVER_BUDGET = (
    "a rank was sent more rows than moe_expert_rank_capacity_factor makes room for, and tokens lost experts; raise it"
)
OVER_CAPACITY = (
    "an expert was sent more rows than its capacity; does the router not drop tokens over capacity, or have ranks "
    "different numbers of tokens?"
)


class EPTokenDispatcher(MoETokenDispatcher):
    """Drop-in for Megatron's all-to-all dispatcher: same arguments, six steps and gradients.

    num_local_experts: L, experts on this rank.
    local_expert_indices: their ids, consecutive.
    config: the model's config. The dispatcher reads num_moe_experts, moe_router_topk, the capacity, padding and overlap
        settings, and the fields of `options.Options`.
    pg_collection: groups ep, expt_tp and tp_ep; tokens move over tp_ep.

    Raises ValueError if TP is over 32; for 1F1B overlap without flex + hybridep (or ncclep) declared, or with a
    Megatron whose schedule uses a dispatcher in another way; for options that are out of range or that contradict the
    config; for values of `flags.REFUSED_VALUES`.

    A decoding step of Megatron's inference promises few tokens, see `_promise`.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        if self.tp_size > MAX_TOPK:
            raise ValueError(f"expert_tensor_parallel_size is {self.tp_size}, allowed: at most {MAX_TOPK}")
        self.num_choices = min(config.moe_router_topk, MAX_TOPK // self.tp_size)
        if config.overlap_moe_expert_parallel_comm and not declares_grouped(config):
            # With other types Megatron frees received rows that the experts still need.
            raise ValueError(
                "overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type='flex' and "
                f"moe_flex_dispatcher_backend='hybridep', got '{config.moe_token_dispatcher_type}' and "
                f"'{config.moe_flex_dispatcher_backend}'"
            )
        if config.overlap_moe_expert_parallel_comm:
            if getattr(config, "moe_ncclep_zero_copy", False):
                raise ValueError(
                    "moe_ncclep_zero_copy is True with overlap_moe_expert_parallel_comm, whose schedule then takes "
                    "gradients from buffers of NCCL's that this dispatcher does not have: must be False"
                )
            check_overlap()
        self.alignment = _expert_alignment(config)
        _refuse_values(config)
        self.options = options_for(config)
        self._num_sms = num_sms_of(config)
        _check_options(self.options, config)
        self.forward_scales = fp8_rows.scales_for(config)
        self.backward_dtype = fp8_rows.gradient_dtype(self.options, config)
        self._groups = pg_collection
        count_layer(self.tp_ep_group)
        expect(self.tp_ep_group, self)
        # These attributes have Megatron's names because its inference code changes them at run time.
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity
        self.moe_expert_capacity_factor = config.moe_expert_capacity_factor

        self.trusts_router = False  # whether the router chooses at most moe_router_topk experts for a token
        self.may_skip_combine = False  # whether a replay of only this layer needs no combine
        self._replays, self._lost = Replays(), LostChoices()
        self._choice: Choice | None = None  # choice of the router in this pass, if a checkpoint keeps it
        self._layout: Layout | None = None  # layout of this pass and its replay
        self._is_unread = False  # whether nobody reads the sum of this pass
        self._chunk = 0  # which of the layer's chunks this dispatcher moves
        self.cudagraph_attrs = ["topk_idx", "split_rows"]
        self.topk_idx: torch.Tensor | None = None
        self.split_rows: torch.Tensor | None = None
        self.rows_per_token = 1
        self.hidden_shape: torch.Size | None = None
        self._probs_dtype: torch.dtype | None = None
        self._handle: ep.Handle | None = None
        self._row_probs: torch.Tensor | None = None
        self._last_counts: RowCounts | None = None
        self._comm_manager = StepState(
            self.options.moe_expert_rank_capacity_factor, router_topk=config.moe_router_topk * self.tp_size
        )
        # If Megatron's config has the field, its trainer calls `check_over_budget` and repeats the step.
        repeats = getattr(config, "moe_expert_rank_capacity_factor", None) is not None
        self._of_rank = RowLimit(OVER_BUDGET, poisons=not repeats)
        self._of_expert = RowLimit(OVER_CAPACITY)
        self._least_rows = 0  # the least R if it is fixed

    def set_shared_experts(self, shared_experts: SharedExpertMLP) -> None:
        super().set_shared_experts(shared_experts)
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")
        self.cudagraph_attrs.append("shared_experts.cached_fc1_input")

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Returns no buffers: experts do not write into communication buffers here."""
        return None, None

    def check_over_budget(self) -> torch.Tensor | None:
        """Returns bool [1] on the device: whether a dispatch since the last reset had more rows than
        moe_expert_rank_capacity_factor makes room for; None before the first one. Megatron's trainer calls it."""
        return self._of_rank.over_budget

    def check_required_capacity(self) -> torch.Tensor | None:
        """Returns int64 [1] on the device: the most rows, including padding, that a dispatch since the last reset had
        for this rank; None before the first one, and unless Megatron's config has moe_expert_rank_capacity_factor."""
        return self._of_rank.required

    def grow_ep_recv_capacity(self, new_capacity: int) -> None:
        """Makes room for at least this many rows from now on, if moe_expert_rank_capacity_factor fixes their number."""
        self._least_rows = max(self._least_rows, new_capacity)

    def invalidate_ep_bootstrap(self) -> None:
        """Does nothing: no buffer depends on the number of rows."""

    def reset_over_budget(self) -> None:
        self._of_rank.reset()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turns a router's choices into top-k ids and weights; sends nothing.

        hidden_states: [..., H], T tokens in all.
        routing_map: bool [T, E]; a row may hold any number of True. Or, from a sparse `EPTopKRouter`, int64 expert ids
            [T, moe_router_topk], -1 for none.
        probs: [T, E], any floating dtype, read where routing_map is True; or the weights of the ids, their shape.

        Returns tokens [T, H] and weights [T, K * TP] (fp32, or fp64 for fp64 probs), differentiable in both. K is
        moe_router_topk, but K * TP at most 32. A token with more than K experts is repeated, and T counts its copies.
        With drop-and-pad a choice of probability exactly 0 is padding: it contributes nothing, and its probability gets
        no gradient.

        The host does not wait to search a routing_map of Megatron's own router, or under a CUDA graph, for tokens with
        more than moe_router_topk experts. The dispatch then rejects such a token because of invalid ids.

        Raises ValueError if routing_map or probs has another shape.
        """
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1]).contiguous()
        is_dense = routing_map.dtype == torch.bool
        width = self.config.num_moe_experts if is_dense else self.config.moe_router_topk
        with abort_peers_on_error(self.tp_ep_group):
            _require_shape("routing_map", routing_map, (self._num_tokens, width))
            _require_shape("probs", probs, (self._num_tokens, width))
        if is_dense:
            if self.drop_and_pad:
                # Megatron fills each expert up to its capacity with choices of probability 0. They are not sent,
                # because expert_capacity reserves their rows at the receiver.
                routing_map = routing_map & (probs != 0)
            topk_idx, weights = choices_of(routing_map, probs, self._max_experts(routing_map))
        else:
            topk_idx, weights = routing_map, probs
        self.split_rows = None
        if topk_idx.shape[1] != self.num_choices:
            tokens, topk_idx, weights = self._split_tokens(tokens, topk_idx, weights)
        weights = weights if weights.dtype == torch.float64 else weights.float()
        topk_idx, weights = self._recognize_replay(topk_idx, weights)
        self.topk_idx, weights = replicated(topk_idx, weights, self.tp_size, self.num_local_experts)
        self._probs_dtype = probs.dtype
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return tokens, weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends tokens [T, H] with weights [T, K * TP] to their experts; collective over the tp_ep group.

        Returns rows [R, H] grouped by local expert and probs [R] in the router's dtype, ones if combine applies them.
        With moe_expert_rank_capacity_factor R is fixed, and rows after the last expert's are zeros, or undefined under
        no_grad. If R or, with drop-and-pad, an expert's capacity is too small, probs are NaN and
        `megatron_ep.raise_if_failed` raises EPOverflowError. They are not NaN if Megatron's config has the factor,
        because its trainer then calls `check_over_budget`.
        """
        self._wait_before_shared_experts()
        capacity = self._expert_capacity() if self.drop_and_pad else None
        max_rows = self._max_rows() if capacity is None else capacity * self.num_local_experts
        received = self._send(self._buffer_for(hidden_states), hidden_states, probs, capacity, max_rows)
        counts, row_probs = received.tokens_per_expert, received.probs
        # Gradients of weights, and quantization, read all rows.
        reads_all = not received.x.requires_grad and (torch.is_grad_enabled() or self.config.fp8 or self.config.fp4)
        if capacity is not None:
            if reads_all:
                received.x.masked_fill_((row_probs == 0).unsqueeze(1), 0)
            row_probs = self._of_expert.admit(received)
            if not counts_on_device(self.config):  # the host knows the counts: each expert has `capacity` rows
                counts = torch.full((self.num_local_experts,), capacity, device="cpu")
        elif max_rows is not None:
            row_probs, counts = self._of_rank.admit(received), counts_within(counts, max_rows)
            if reads_all:
                clear_behind(received.x, counts)
        self._handle = received.handle
        self._comm_manager.tokens_per_expert = counts
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(received.x)
        if self.options.moe_apply_probs_on_combine:
            self._row_probs, row_probs = row_probs, torch.ones_like(row_probs)
        return received.x, row_probs.to(self._probs_dtype)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns rows [R, H], int64 [L] rows of each local expert (including padding), probs [R].

        The rows are unchanged. The counts are on the CPU, unless experts read them on the device or the host does not
        know them.
        """
        tokens_per_expert = self._comm_manager.tokens_per_expert
        assert tokens_per_expert is not None, "token_dispatch comes first"
        if counts_on_device(self.config):
            tokens_per_expert = tokens_per_expert.to(hidden_states.device)
        return hidden_states, tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the experts' rows [R, H] to their tokens and sums them: [T, H]; collective over the tp_ep group."""
        self._wait_before_shared_experts()
        handle, self._handle = self._handle, None
        row_probs, self._row_probs = self._row_probs, None
        assert handle is not None, "token_dispatch comes first"
        if row_probs is not None:
            row_probs = row_probs.to(torch.promote_types(hidden_states.dtype, torch.float32))
        hidden_states = hidden_states.contiguous()
        bring_back = unread_combine if self._is_unread else ep.combine
        self._layout, self._is_unread = None, False  # the next pass may be a graph's replay, which finds none
        output = bring_back(hidden_states, handle, row_probs, backward_dtype=self.backward_dtype)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] in the shape that `dispatch_preprocess` was given, with the shared experts' output added."""
        if self.split_rows is not None:
            rows = hidden_states.new_zeros(self._num_tokens * self.rows_per_token, hidden_states.shape[1])
            rows = rows.index_copy(0, self.split_rows, hidden_states)
            hidden_states = rows.view(self._num_tokens, self.rows_per_token, hidden_states.shape[1]).sum(dim=1)
        assert self.hidden_shape is not None, "dispatch_preprocess comes first"
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def exchange_counts(self, hidden_states: torch.Tensor) -> None:
        """Exchanges the counts of `topk_idx` for the token_dispatch of tokens [T, H] that follows, which then waits for
        none; collective over the tp_ep group. Does nothing in a replay, which knows them."""
        assert self.topk_idx is not None, "dispatch_preprocess comes first"
        buffer = self._buffer_for(hidden_states)
        if self._layout is None:
            self._layout = Layout(self.topk_idx)
        if self._known_handle(buffer) is None:
            with torch.no_grad():
                self._dispatch(buffer, hidden_states[:, :COUNTED_ELEMENTS], None, expert_alignment=self.alignment)

    def _buffer_for(self, hidden_states: torch.Tensor) -> ep.Buffer:
        num_experts = self.config.num_moe_experts * self.tp_size
        settings = {
            "num_sms": self._num_sms,
            "row_bytes": hidden_states.shape[-1] * hidden_states.element_size(),
            "max_tokens": self.options.moe_low_latency_max_tokens,
        }
        buffer = shared_buffer(self.tp_ep_group, num_experts, hidden_states.device, settings)
        announce(self.tp_ep_group, self._groups, buffer)
        return buffer

    def _send(
        self, buffer: ep.Buffer, x: torch.Tensor, probs: torch.Tensor, capacity: int | None, max_rows: int | None
    ) -> ep.Received:
        assert self.topk_idx is not None, "dispatch_preprocess comes first"
        fp8: dict[str, Any] = {}
        if self.options.moe_dispatch_fwd_dtype == "fp8":
            fp8 = {"forward_dtype": torch.float8_e4m3fn, "forward_scales": self.forward_scales}
        handle = self._known_handle(buffer)
        if handle is not None:
            return ep.dispatch(x, None, probs, handle=handle, **fp8)
        return self._dispatch(
            buffer,
            x,
            probs,
            expert_alignment=self.alignment if capacity is None else 1,
            expert_capacity=capacity,
            max_recv_tokens=max_rows,
            **fp8,
        )

    def _dispatch(self, buffer: ep.Buffer, x: torch.Tensor, probs: torch.Tensor | None, **settings: Any) -> ep.Received:
        """Dispatches with new ids, and keeps the layout if the pass has one."""
        of_buffer, is_traced = rank_group_of(buffer), torch.compiler.is_compiling()
        if not is_traced:  # expects the counts of this layer's last dispatch, not of the previous layer's
            of_buffer.last_counts = self._last_counts
        promise = self._promise(of_buffer)
        received = ep.dispatch(x, self.topk_idx, probs, buffer=buffer, max_tokens=promise, **settings)
        if not is_traced:
            self._last_counts = of_buffer.last_counts
        if self._layout is not None:
            self._layout.handles[self._chunk] = received.handle
        return received

    def _known_handle(self, buffer: ep.Buffer) -> ep.Handle | None:
        """Returns the handle that this pass repeats; None if it is of a buffer that has been closed since."""
        handle = None if self._layout is None else self._layout.handles.get(self._chunk)
        return handle if handle is not None and handle.group is rank_group_of(buffer) else None

    def begin_routing(self, num_tokens: int) -> Choice | None:
        """Returns the choice that the router makes in a checkpoint's forward pass of T tokens, and takes in its replay;
        None elsewhere. Raises ValueError for a replay with another T."""
        self._choice = None
        if self._may_replay:
            with abort_peers_on_error(self.tp_ep_group):
                self._choice = self._replays.coming(num_tokens)
        return self._choice

    def _recognize_replay(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds the layout of the forward pass that this one repeats, or makes one for its replay. All ranks must
        decide alike, because the exchange of counts needs all of them.

        Returns the choice [T, K] of the forward pass and its weights, 0 for experts that are not chosen now.
        """
        self._layout, self._is_unread = None, False
        choice, self._choice = self._choice, None
        if not self._may_replay:
            return topk_idx, weights
        with abort_peers_on_error(self.tp_ep_group):
            self._layout, replay = self._replays.next(topk_idx, None if choice is None else choice.topk_idx)
        if self._layout is None or replay is None:
            return topk_idx, weights
        self._is_unread = self.may_skip_combine and replay.is_of_layer(self)
        weights, lost = weights_of(self._layout.topk_idx, topk_idx, weights)
        if choice is None or self.moe_expert_capacity_factor is not None:  # otherwise none is lost
            self._lost.note(lost)
        return self._layout.topk_idx, weights

    @property
    def _may_replay(self) -> bool:
        is_even = self.trusts_router and self.num_choices == self.config.moe_router_topk  # no token is split
        return is_even and not torch.compiler.is_compiling()

    def _promise(self, group: RankGroup) -> int | None:
        """Returns the number of tokens that no rank exceeds in this step: few in a decoding step, which therefore goes
        in one hop, otherwise any; None if the buffer has no calls in one hop.

        All ranks of the group must decide alike, so only conditions that are equal on all of them count: whether
        Megatron's inference pads the experts, and the number of tokens of a step, which its own all-to-all also needs
        to be equal.
        """
        if group.one_hop is None:
            return None
        decodes = (
            self.drop_and_pad
            and not torch.is_grad_enabled()
            and self.trusts_router
            and self.num_choices == self.config.moe_router_topk
            and self._num_tokens <= group.one_hop.max_tokens
        )
        return group.one_hop.max_tokens if decodes else MAX_ROWS

    @property
    def _num_tokens(self) -> int:
        assert self.hidden_shape is not None, "dispatch_preprocess comes first"
        return math.prod(self.hidden_shape[:-1])

    def _max_experts(self, routing_map: torch.Tensor) -> int:
        """Returns the largest number of experts of a token, at least moe_router_topk."""
        topk = self.config.moe_router_topk
        is_captured = routing_map.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph has fixed shapes
        if self.trusts_router or routing_map.shape[0] == 0 or is_captured:
            return topk
        return max(topk, int(routing_map.sum(dim=1).amax()))  # the host waits

    def _split_tokens(
        self, tokens: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits choices [T, more than K] into [T', K], one row for each K choices, because all ranks need the same K.

        Each row is later copied to its own place, because additions to the same place have no fixed order on a GPU.
        """
        self.rows_per_token = -(-topk_idx.shape[1] // self.num_choices)
        missing = self.rows_per_token * self.num_choices - topk_idx.shape[1]
        topk_idx = pad(topk_idx, (0, missing), value=-1).view(-1, self.num_choices)
        weights = pad(weights, (0, missing)).view(-1, self.num_choices)
        self.split_rows = (topk_idx != -1).any(dim=1).nonzero().squeeze(1)
        rows = tokens.unsqueeze(1).expand(-1, self.rows_per_token, -1).reshape(-1, tokens.shape[1])
        rows, topk_idx, weights = (part.index_select(0, self.split_rows) for part in (rows, topk_idx, weights))
        return rows, topk_idx, weights

    def _max_rows(self) -> int | None:
        """Returns R by Megatron's rule for a rank's budget; None if R is not fixed."""
        factor = self._comm_manager.moe_expert_rank_capacity_factor
        if factor is None:
            return None
        self._comm_manager._max_tokens_per_rank = self._num_tokens
        budget = max(int(self._num_tokens * self.config.moe_router_topk * self.tp_size * factor), self._least_rows)
        return max(1, -(-budget // self.alignment)) * self.alignment

    def _expert_capacity(self) -> int:
        """Returns the rows of every local expert with drop-and-pad: the most that a rank may send it, times the ranks.

        A rank without tokens makes room for those of the others; if no rank has any, for one row per rank, because a
        dispatch needs a capacity above 0.
        """
        num_tokens = self._num_tokens or self.options.moe_low_latency_max_tokens or 0
        capacity = get_capacity(
            num_tokens=num_tokens * self.config.moe_router_topk,
            num_experts=self.config.num_moe_experts,
            capacity_factor=self.moe_expert_capacity_factor,
        )
        return max(1, capacity) * self.tp_size * self.ep_size

    def _wait_before_shared_experts(self) -> None:
        """Keeps the shared experts from overlapping the work before the communication that they should overlap."""
        wait = getattr(self.shared_experts, "wait_current_stream", None)  # Megatron-Core 0.16 has none
        if wait is not None:
            wait()


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, must be {shape}")


def _refuse_values(config: TransformerConfig) -> None:
    for flag, (refused, why) in REFUSED_VALUES.items():
        value = getattr(config, name := field_of(flag), None)
        if value is not None and refused in (None, value):
            raise ValueError(f"{name} is {value!r}: {why}: leave it out")
    if HAS_INVARIANT_SUMS and getattr(config, "batch_invariant_mode", False):
        raise ValueError(
            "batch_invariant_mode is True: Megatron's all-to-all then sums a token's rows in the order of its "
            "inference, and this dispatcher in another: leave it out, or train with Megatron's dispatcher"
        )


def _check_options(options: Options, config: TransformerConfig) -> None:
    for name, other in (
        ("moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity"),
        ("moe_apply_probs_on_combine", "moe_apply_probs_on_input"),
        ("moe_apply_probs_on_combine", "overlap_moe_expert_parallel_comm"),  # frees rows that combine would keep
    ):
        if getattr(options, name) and getattr(config, other):
            raise ValueError(f"{name} is {getattr(options, name)} with {other}: give one of the two")
    if _captures_steps(config):
        if options.moe_expert_rank_capacity_factor is None and not config.moe_pad_expert_input_to_capacity:
            raise ValueError(
                "moe_expert_rank_capacity_factor is None with a CUDA graph of the full iteration, must be a number: "
                "the shapes of a graph are fixed, and its host cannot wait for counts"
            )
        if config.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"pipeline_model_parallel_size is {config.pipeline_model_parallel_size}, must be 1 with a CUDA graph "
                "of the full iteration: others have never run with this dispatcher"
            )


def _captures_steps(config: TransformerConfig) -> bool:
    """Returns whether Megatron captures the forward and backward passes of all micro-batches in one CUDA graph."""
    scope = getattr(config, "cuda_graph_scope", None) or ()  # before 0.19
    graphed = scope.split(",") if isinstance(scope, str) else [getattr(part, "name", part) for part in scope]
    return "full_iteration" in (config.cuda_graph_impl, *graphed)


def counts_on_device(config: TransformerConfig) -> bool:
    """Returns whether Megatron's grouped experts read tokens_per_expert on the device."""
    grouped = getattr(config, "moe_use_grouped_tensor", None)  # from 0.20 on, where the op fuser implies it
    if grouped is None:
        return bool(getattr(config, "use_transformer_engine_op_fuser", False))
    return bool(grouped and moe_utils.skip_routed_expert_padding(config))  # if they pad, they do so on the host


def _expert_alignment(config: TransformerConfig) -> int:
    """Returns the alignment of the rows of an expert that the installed Megatron requires from the dispatcher; 1 if its
    experts pad rows themselves."""
    trusts = getattr(moe_utils, "skip_routed_expert_padding", None)  # absent from older versions
    if trusts is not None:
        trusted = trusts(config)
    else:
        trusted = config.moe_router_padding_for_quantization or (
            declares_grouped(config) and bool(config.fp8 or config.fp4)
        )
    return max(1, get_align_size_for_quantization(config)) if trusted else 1
