"""Every wrong argument is a ValueError that names it, before anything is launched."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import megatron_ep as ep
from megatron_ep.buffer import host
from megatron_ep.buffer.arguments import check_num_tokens
from megatron_ep.buffer.distributed import with_timeout_of
from megatron_ep.fabrics import gpu

T, H, K, E = 4, 8, 2, 8


@pytest.fixture
def cluster():
    with ep.LocalCluster(
        2, 1, ep.Config(num_experts=E, tuning=ep.Tuning(nvl_ring_bytes=4096, rdma_ring_bytes=8192))
    ) as cluster:
        yield cluster


def good():
    """Arguments of a dispatch of two ranks."""
    ids = [torch.stack([torch.randperm(E)[:K] for _ in range(T)]) for _ in range(2)]
    x, weights = ([torch.randn(T, H) for _ in range(2)], [torch.rand(T, K) for _ in range(2)])
    return {"x": x, "topk_idx": ids, "topk_weights": weights}


def with_value(tensor, value):
    tensor = tensor.clone()
    tensor[1, 1] = value
    return tensor


def freed(tensor):
    """As recomputation and sharding free the memory of tensors."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


BAD = {
    "x of integers": ("x", lambda t: t.int(), "x is torch.int32, must be one of torch.bfloat16"),
    "x of another length": ("x", lambda t: t[:3], r"x has shape \(3, 8\), must be \[4, H\]"),
    "x flat": ("x", lambda t: t.flatten(), r"x has shape \(32,\)"),
    "x empty rows": ("x", lambda t: t[:, :0].contiguous(), "H >= 1"),
    "x of a batch": (
        "x",
        lambda t: t.view(2, 2, H),
        r"x has shape \(2, 2, 8\), must be \[4, H\]: x\.reshape\(-1, x\.shape\[-1\]\)",
    ),
    "x on another device": ("x", lambda t: t.to("meta"), "x is on meta"),
    "x too long": ("x", lambda t: torch.randn(T, 2000), r"Tuning.nvl_ring_bytes is 4096, must be at least \d+"),
    "x negated": ("x", torch._neg_view, "x is a view that negates"),
    "x sparse": ("x", lambda t: t.to_sparse(), "x is a torch.sparse_coo tensor, must be strided"),
    "x of compressed rows": ("x", lambda t: t.to_sparse_csr(), "x is a torch.sparse_csr tensor, must be strided"),
    "x nested": ("x", lambda t: torch.nested.nested_tensor(list(t)), "x is a nested tensor, must be strided"),
    "x of two tensors": ("x", lambda t: TwoTensor(t, t), "x is a TwoTensor without memory, must have memory"),
    "x freed": ("x", freed, "x is a Tensor without memory, must have memory"),
    "x no tensor": ("x", lambda t: t.tolist(), "x is a list, must be a tensor"),
    "ids of floats": ("topk_idx", lambda t: t.float(), "topk_idx is torch.float32, must be one of torch.int64"),
    "ids of a batch": ("topk_idx", lambda t: t.view(2, 2, K), r"topk_idx\.reshape\(-1, topk_idx\.shape\[-1\]\)"),
    "ids flat": ("topk_idx", lambda t: t[:, 0].contiguous(), r"topk_idx has shape \(4,\), must be \[T, K\]"),
    "too many ids": ("topk_idx", lambda t: t.repeat(1, 17), "1 <= K <= 32"),
    "no ids": ("topk_idx", lambda t: t[:, :0].contiguous(), "1 <= K <= 32"),
    "id too large": (
        "topk_idx",
        lambda t: with_value(t, E),
        r"topk_idx of rank 1 is \[\d, 8\] at token 1, must hold distinct ids in \[0, 8\)",
    ),
    "id too small": ("topk_idx", lambda t: with_value(t, -2), r"-2\] at token 1"),
    "id huge": ("topk_idx", lambda t: with_value(t, 2**40 + 3), "at token 1"),
    "id twice": ("topk_idx", lambda t: t[:, :1].repeat(1, 2), "at token 0, must hold distinct ids"),
    "weights of integers": (
        "topk_weights",
        lambda t: t.int(),
        "topk_weights is torch.int32, must be one of torch.float32, torch.float64",
    ),
    "weights freed": ("topk_weights", freed, "topk_weights is a Tensor without memory, must have memory"),
    "weights of another shape": (
        "topk_weights",
        lambda t: t[:, :1].contiguous(),
        r"topk_weights has shape \(4, 1\), must be \(4, 2\)",
    ),
}


@pytest.mark.parametrize("is_first", [True, False])  # or comes after a right call, whose looks are known
@pytest.mark.parametrize("name", BAD)
def test_bad_tensors(cluster, name, is_first):
    argument, spoil, message = BAD[name]
    if not is_first:
        assert_usable(cluster)
    given = good()
    given[argument][1] = spoil(given[argument][1])
    if name in (
        "x of integers",
        "ids of floats",
        "weights of integers",
        "too many ids",
        "no ids",
        "x too long",
        "x empty rows",
    ):
        given[argument][0] = spoil(given[argument][0])  # else the ranks differ, which is another mistake
    with pytest.raises(ValueError, match=message):
        ep.dispatch(**given, buffer=cluster)
    assert_usable(cluster)


def test_settings_that_equal_right_ones_are_refused(cluster):
    given = good()
    ep.dispatch(**given, buffer=cluster, expert_alignment=1, max_recv_tokens=16)
    for wrong in ({"expert_alignment": True}, {"expert_alignment": 1.0}, {"max_recv_tokens": 16.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            ep.dispatch(**given, buffer=cluster, **{"max_recv_tokens": 16, **wrong})
    assert_usable(cluster)


def assert_usable(cluster):
    given = good()
    rows = ep.dispatch(**given, buffer=cluster)
    torch.testing.assert_close(ep.combine(rows.x, rows.handle), [K * x for x in given["x"]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_token_of_invalid_ids_is_named(cluster, dtype):
    given = good()
    given["topk_idx"] = [ids.to(dtype) for ids in given["topk_idx"]]
    for token, ids in ((1, [3, 3]), (2, [0, E]), (3, [-2, 1])):
        given["topk_idx"][0][token] = torch.tensor(ids, dtype=dtype)
    with pytest.raises(ValueError, match=r"topk_idx of rank 0 is \[3, 3\] at token 1, must hold distinct ids"):
        ep.dispatch(**given, buffer=cluster)
    assert_usable(cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_alignment": 0}, r"expert_alignment is 0, must be an int in \[1, 268435456\]"),
        ({"expert_alignment": 2.0}, "expert_alignment is 2.0"),
        ({"expert_capacity": 0}, "expert_capacity is 0, must be an int in"),
        ({"max_recv_tokens": -1}, "max_recv_tokens is -1, must be an int in"),
        ({"expert_alignment": 2**30}, "expert_alignment is 1073741824, must be an int in"),
        ({"expert_capacity": 2**40}, "expert_capacity is 1099511627776, must be an int in"),
        ({"max_recv_tokens": 2**31}, "max_recv_tokens is 2147483648, must be an int in"),
        ({"expert_capacity": 4, "expert_alignment": 2}, "expert_alignment is 2, must be 1 with expert_capacity"),
        ({"layout": "rows"}, "layout is 'rows', must be one of 'grouped', 'flat'"),
        ({"layout": np.array(["flat", "grouped"])}, r"layout is array\(.*, must be one of 'grouped', 'flat'"),
        ({"layout": "flat", "expert_capacity": 3}, "expert_capacity is 3, must be None with layout 'flat'"),
        ({"layout": "flat", "topk_idx": [torch.ones(T, K).long()] * 2}, "must hold distinct ids"),
        ({"forward_dtype": torch.float8_e5m2}, r"forward_dtype is torch\.float8_e5m2, must be torch\.float8_e4m3fn"),
        (
            {"forward_dtype": torch.float8_e4m3fn, "x": [torch.ones(T, H).double()] * 2},
            r"x with forward_dtype is torch\.float64, must be one of torch\.bfloat16",
        ),
        ({"forward_scales": "pow2"}, "forward_scales is 'pow2', must be 'fp32' without forward_dtype"),
        (
            {"forward_scales": "ue8m0", "forward_dtype": torch.float8_e4m3fn},
            "forward_scales is 'ue8m0', must be one of 'fp32', 'pow2'",
        ),
        ({"scales": [torch.ones(T, 1)] * 2}, "scales must be given only with x of torch.float8_e4m3fn"),
        ({"topk_idx": None}, "topk_idx is a NoneType, must be a list of 2 tensors"),
        ({"x": torch.ones(T, H)}, "x is a Tensor, must be a list of 2 tensors"),
        ({"x": [torch.ones(T, H)]}, "x is 1 items, must be a list of 2 tensors"),
        (
            {"x": [torch.ones(T, H), torch.ones(T, H).double()]},
            "x is torch.float32 on one rank and torch.float64 on another",
        ),
        ({"x": [torch.ones(T, H), torch.ones(T, 16)]}, "x has H = 8 on one rank and 16 on another"),
        ({"buffer": None}, "buffer is None"),
        ({"buffer": "cluster"}, "buffer is a str"),
        ({"handle": "handle"}, "handle is a str"),
    ],
)
def test_bad_options(cluster, options, message):
    with pytest.raises(ValueError, match=message):
        ep.dispatch(**good() | {"buffer": cluster} | options)
    assert_usable(cluster)


def test_bad_float8(cluster):
    ids = [torch.zeros(T, 1, dtype=torch.int64)] * 2
    x = [torch.zeros(T, 200, dtype=torch.float8_e4m3fn)] * 2
    for scales, message in (
        (None, "scales must be given with x of torch.float8_e4m3fn"),
        ([torch.ones(T, 1)] * 2, r"scales has shape \(4, 1\), must be \(4, 2\)"),
        ([torch.ones(T, 2).half()] * 2, "scales is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            ep.dispatch(x, ids, scales=scales, buffer=cluster)
    rows = ep.dispatch(x, ids, scales=[torch.ones(T, 2)] * 2, buffer=cluster)
    with pytest.raises(ValueError, match=r"x is torch.float8_e4m3fn, must be one of torch.bfloat16"):
        ep.combine(rows.x, rows.handle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_dtype": torch.int8}, r"backward_dtype is torch\.int8, must be None or one of torch\.float8_e4m3fn"),
        ({"weights": True}, r"backward_dtype is torch\.float8_e5m2, must be None with weights"),
        ({"dtype": torch.float64}, r"x with backward_dtype is torch\.float64, must be one of torch\.bfloat16"),
    ],
)
def test_bad_types_of_gradients(cluster, options, message):
    rows = ep.dispatch(**good(), buffer=cluster)
    x = [part.to(options.get("dtype", torch.float32)) for part in rows.x]
    weights = rows.probs if "weights" in options else None
    with pytest.raises(ValueError, match=message):
        ep.combine(x, rows.handle, weights, backward_dtype=options.get("backward_dtype", torch.float8_e5m2))
    assert_usable(cluster)


def test_bad_handles(cluster):
    arguments = good()
    rows = ep.dispatch(**arguments, buffer=cluster)
    with pytest.raises(ValueError, match=r"x has shape \(1, 8\), must be \["):
        ep.combine([torch.ones(1, H)] * 2, rows.handle)
    with pytest.raises(ValueError, match="handle is a NoneType, must be the handle of a dispatch"):
        ep.combine(rows.x, None)
    with pytest.raises(ValueError, match="topk_idx must not be given with a handle"):
        ep.dispatch(**arguments, handle=rows.handle)
    for name, value in (("expert_alignment", 2), ("layout", np.array(["grouped"] * 2)), ("max_tokens", 16)):
        with pytest.raises(ValueError, match=f"{name} must not be given with a handle"):
            ep.dispatch(arguments["x"], handle=rows.handle, **{name: value})
    with (
        ep.LocalCluster(2, 1, cluster.config) as other,
        pytest.raises(ValueError, match="handle belongs to another buffer"),
    ):
        ep.dispatch(arguments["x"], handle=rows.handle, buffer=other)
    cluster.close()
    with pytest.raises(ValueError, match="buffer is closed"):
        ep.combine(rows.x, rows.handle)
    with pytest.raises(ValueError, match="buffer is closed"):
        ep.dispatch(**arguments, buffer=cluster)


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_and_strided_tensors_are_converted_with_their_gradient(cluster, dtype, low_latency):
    """In each of three calls, of which the last two have known looks."""
    mode = ep.LowLatency(cluster, max_tokens=T, hidden=H, topk=K, dtype=torch.float32) if low_latency else None
    ids = good()["topk_idx"]
    x = [torch.randn(H, T) for _ in range(2)]
    w = [torch.rand(T, K).to(dtype) for _ in range(2)]

    def results(prepare):
        leaves = [t.clone().requires_grad_() for t in (*x, *w)]
        xs, ws = [prepare(t.t()) for t in leaves[:2]], [prepare(t, torch.float32) for t in leaves[2:]]
        if mode is None:
            rows = ep.dispatch(xs, ids, ws, buffer=cluster)
            # of columns, and weights of x's half
            out = [prepare((2 * r).t().contiguous().t()) for r in rows.x]
            y = ep.combine(out, rows.handle, [prepare(p.to(dtype), torch.float32) for p in rows.probs])
        else:
            rows = mode.dispatch(xs, ids, ws)
            out = [prepare((2 * r).transpose(0, 1).contiguous().transpose(0, 1)) for r in rows.x]
            y = mode.combine(out, rows.handle, ws)
        sum((part * part).sum() for part in y).backward()
        return *y, *rows.probs, *(t.grad for t in leaves)

    want = results(lambda t, dtype=None: t.to(dtype or t.dtype).contiguous())
    for _ in range(3):
        got = results(lambda t, dtype=None: t)
        assert [t.dtype for t in got[-2:]] == [dtype] * 2
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w[0], "weights is a Tensor, must be a list of 2 tensors"),
        (lambda w: w[:1], "weights is 1 items, must be a list of 2 tensors"),
        (lambda w: [w[0], None], "weights is a NoneType, must be a tensor"),
        (lambda w: [w[0], w[1][:-1]], r"weights has shape \(\d+,\), must be \(\d+,\)"),
        (lambda w: [w[0], w[1].unsqueeze(1)], r"weights has shape \(\d+, 1\), must be \(\d+,\)"),
        (lambda w: [torch.ones(T, K)] * 2, r"weights has shape \(4, 2\), must be \(\d+,\): .* such as rows.probs"),
        (lambda w: [t.double() for t in w], r"weights is torch.float64, must be one of torch.float32: .* rows\.probs"),
        (lambda w: [w[0], w[1].double()], "weights is torch.float32 on one rank and torch.float64 on another"),
        (lambda w: [w[0], w[1].to("meta")], "weights is on meta, must be on cpu"),
        (lambda w: [w[0], torch._neg_view(w[1])], "weights is a view that negates"),
    ],
)
def test_bad_weights_of_combine(cluster, spoil, message):
    rows = ep.dispatch(**good(), buffer=cluster, expert_alignment=2)
    weights = [torch.ones(len(r)) for r in rows.x]
    with pytest.raises(ValueError, match=message):
        ep.combine(rows.x, rows.handle, spoil(weights))
    with pytest.raises(ValueError, match=r"weights is torch\.float32, must be one of torch\.float64"):
        ep.combine([r.double() for r in rows.x], rows.handle, weights)
    assert all(map(torch.equal, ep.combine(rows.x, rows.handle, weights), ep.combine(rows.x, rows.handle)))
    assert_usable(cluster)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ep.Topology(0, 1), "Topology.nodes is 0, must be an int in"),
        (lambda: ep.Topology(1, 1.5), "Topology.ranks_per_node is 1.5"),
        (lambda: ep.Config(num_experts=0), "Config.num_experts is 0"),
        (lambda: ep.Config(num_experts=8, tuning=ep.Tuning(channels=0)), "Tuning.channels is 0"),
        (lambda: ep.Config(num_experts=8, timeout=0), "Config.timeout is 0"),
        (lambda: ep.Config(num_experts=8, timeout=float("inf")), "Config.timeout is inf"),
        (lambda: ep.Config(num_experts=8, tuning=ep.Tuning(nvl_ring_bytes=3)), "Tuning.nvl_ring_bytes is 3"),
        (
            lambda: ep.Config(num_experts=8, tuning=ep.Tuning(nvl_ring_bytes=2**62)),
            "Tuning.nvl_ring_bytes is 4611686018427387904",
        ),
        *(
            (lambda value=value: ep.Config(8, max_tokens=value), rf"Config\.max_tokens is {value}, must be an int in")
            for value in (0, 1025, 2.0, True)
        ),
        (lambda: ep.Config(num_experts=2**31), "Config.num_experts is 2147483648"),
        (lambda: ep.Config(num_experts=8, timeout=1e300), r"Config.timeout is 1e\+300"),
        (lambda: ep.Config(num_experts=8, timeout=True), "Config.timeout is True"),
        (
            lambda: ep.LocalCluster(1, 1, ep.Config(num_experts=8), device="banana"),
            "device is 'banana', must be 'cpu' or",
        ),
        (lambda: ep.LocalCluster(1, 1, {"num_experts": 8}), "config is .*, must be a megatron_ep.Config"),
        (lambda: ep.LocalCluster(1, 1, ep.Config(num_experts=8), seed=-1), "seed is -1"),
        (lambda: ep.LocalCluster(1, 1, ep.Config(num_experts=8), seed=1, threads=2), "threads is 2, must be 1 with a"),
        (
            lambda: ep.LocalCluster(2, 2, ep.Config(num_experts=6)),
            "Config.num_experts is 6, must be a multiple of the 4 ranks",
        ),
        (lambda: ep.LocalCluster(1, 1, ep.Config(num_experts=6), threads=0), "threads is 0"),
        *(
            (lambda stalled=stalled, seed=seed: ep.LocalCluster(1, 3, ep.Config(6), seed=seed, stalled=stalled), says)
            for stalled, seed, says in (
                ((1,), 1, r"stalled is \(1,\), must be a rank and the number of one of its waits"),
                ((0, 1), None, r"stalled is \(0, 1\), must be None without a seed"),
                ((3, 1), 0, "stalled's rank is 3"),
                ((0, 0), 0, "stalled's wait is 0"),
            )
        ),
        (
            lambda: ep.LocalCluster(1, 1, ep.Config(num_experts=6), lost_signal=1),
            "lost_signal is 1, must be 0 without a seed",
        ),
    ],
)
def test_bad_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_setting_that_there_is_not():
    with pytest.raises(TypeError, match=r"Config has no setting num_sm; did you mean num_sms\?"):
        ep.Config(num_experts=8, num_sm=2)


def test_rows_that_no_memory_holds(monkeypatch):
    def give_nothing(size):
        raise MemoryError

    monkeypatch.setattr("megatron_ep._C.pooled_bytes", give_nothing)
    with pytest.raises(
        MemoryError, match=r"1024 x 1048576 of torch.float64 take 8.0 GiB, more than this machine gives"
    ):
        host.new_output((1024, 1 << 20), torch.float64)


def test_timeout_from_the_environment(monkeypatch):
    monkeypatch.setenv("MEGATRON_EP_TIMEOUT", "7.5")
    assert ep.Config(num_experts=1).timeout_seconds == 7.5
    assert ep.Config(num_experts=1, timeout=3).timeout_seconds == 3
    monkeypatch.setenv("MEGATRON_EP_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MEGATRON_EP_TIMEOUT is 'soon'"):
        ep.LocalCluster(1, 1, ep.Config(num_experts=1))
    monkeypatch.delenv("MEGATRON_EP_TIMEOUT")
    assert ep.Config(num_experts=1).timeout_seconds == 100


@pytest.mark.parametrize("wanted", [None, 3.5, "banana"])
def test_a_device_that_is_none_is_refused_when_ranks_agree(wanted, monkeypatch):
    monkeypatch.delenv("MEGATRON_EP_TIMEOUT", raising=False)
    config = ep.Config(num_experts=8)
    assert with_timeout_of(None, config, wanted) is config  # and raises nothing on this rank alone
    with pytest.raises(ValueError, match=r"device is .*, must be 'cpu' or 'cuda'"):
        gpu.check_device(wanted)


def test_more_tokens_than_rows_can_be_numbered(cluster):
    """Of two ranks, four experts each: rows of two choices of all tokens may all be of one rank."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    check_num_tokens(cluster._group, [ids.expand(2**29 - 17, 2)] * 2, 1)
    for tokens, alignment in ((2**29 - 16, 1), (2**29 - 17, 2), (2**40, 1)):
        with pytest.raises(
            ValueError, match=rf"topk_idx has {tokens} tokens, must have at most \d+: a rank may be sent"
        ):
            check_num_tokens(cluster._group, [ids.expand(tokens, 2)] * 2, alignment)
    with pytest.raises(ValueError, match=r"hidden is 268435457, must be an int in \[1, 268435456\]"):
        ep.LowLatency(cluster, max_tokens=1, hidden=2**28 + 1, topk=1)


def test_what_dispatch_returns_is_not_the_handles_own(cluster):
    given = good()
    rows = ep.dispatch(**given, buffer=cluster)
    before = [counts.clone() for counts in rows.tokens_per_expert]
    for counts in rows.tokens_per_expert:
        counts.zero_()
    again = ep.dispatch(given["x"], handle=rows.handle)
    assert all(map(torch.equal, again.tokens_per_expert, before))


class Layer(torch.nn.Module):
    def __init__(self, cluster):
        super().__init__()
        self.cluster, self.expert = cluster, torch.nn.Linear(H, H)
        self.low_latency = ep.LowLatency(cluster, max_tokens=T, hidden=H, topk=K, dtype=torch.float32)

    def forward(self, inputs):
        rows = ep.dispatch(**inputs, buffer=self.cluster)
        y = ep.combine([self.expert(part) for part in rows.x], copy.deepcopy(rows.handle), weights=rows.probs)
        received = self.low_latency.dispatch(inputs["x"], inputs["topk_idx"])
        return y + self.low_latency.combine(received.x, copy.deepcopy(received.handle))


def test_copies_share_a_buffer_and_pickles_hold_none(cluster):
    layer, inputs = Layer(cluster), good()
    twin = copy.deepcopy(layer)
    assert twin.cluster is cluster and copy.copy(cluster) is cluster and twin.expert.weight is not layer.expert.weight
    assert all(map(torch.equal, layer(inputs), twin(inputs)))
    rows = ep.dispatch(**inputs, buffer=cluster)
    received = layer.low_latency.dispatch(inputs["x"], inputs["topk_idx"])
    for held in (cluster, layer.low_latency, rows.handle, received.handle):
        with pytest.raises(TypeError, match=f"{type(held).__name__} belongs to its process and cannot be pickled"):
            pickle.dumps(held)
    with pytest.raises(TypeError, match="LocalCluster belongs to its process"):
        pickle.dumps(layer)
    for result in (rows, received):
        with pytest.raises(TypeError, match=r"\wHandle belongs to its process|^Handle belongs to its process"):
            pickle.dumps(result)
