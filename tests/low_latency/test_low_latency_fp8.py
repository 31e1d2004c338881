"""The low-latency mode's float8 rows against the reference, bit by bit."""

import pytest
import torch
from low_latency_cases import LowLatencyCase

import megatron_ep as ep
from megatron_ep import float8, reference
from megatron_ep.reference import SCALE_FORMATS


def extremes(shape, generator):
    """bfloat16 of any size, with zeros of both signs, subnormals, blocks of zeros, infinities and NaN."""
    bits = torch.randint(0, 2**16, shape, generator=generator, dtype=torch.int32)
    kind = torch.randint(0, 8, (shape[0], 1), generator=generator)
    exponents = torch.randint(0, 250, (shape[0], 1), generator=generator, dtype=torch.int32)
    near = (bits & 0x807F) | ((exponents + (bits >> 7) % 8) << 7).clamp_max(0x7F00)  # of a size, with both signs
    bits = torch.where(kind < 6, near, bits)
    bits = torch.where((kind == 6) | (bits % 97 == 0), bits & 0x8000, bits)
    return bits.to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize("hidden", [128, 240])
def test_gradients_have_room_on_their_way_back(hidden):
    """They travel as bfloat16, twice the bytes."""
    x = [torch.ones(3, hidden, dtype=torch.bfloat16, requires_grad=True)]
    ids, weights = [torch.zeros(3, 1, dtype=torch.int64)], [torch.ones(3, 1, requires_grad=True)]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=1)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=3, hidden=128, topk=1)
        if hidden > 128:
            with pytest.raises(
                ValueError, match=r"the gradient of x has rows of 240 x torch.bfloat16, must have at most"
            ):
                low_latency.dispatch(x, ids, fp8="fp32")
            x = [x[0].detach()]
        received = low_latency.dispatch(x, ids, weights, fp8="fp32")
        received.probs[0].sum().backward()
        assert weights[0].grad.eq(1).all() and (x[0].grad is None or not x[0].grad.any())


def bits_of(tensor):
    """On the host; of all NaN the same, since nobody promises their signs."""
    tensor = tensor.cpu()
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return bits.masked_fill(tensor.float().isnan(), torch.iinfo(bits.dtype).max)


def assert_same(ours, expected):
    assert ours.dtype == expected.dtype and torch.equal(bits_of(ours), bits_of(expected))


def rows_of(received, tensors, rank):
    """Of a tensor in the layout of what was received: the rows that hold a token."""
    handle = received.handle
    return tensors[rank].cpu().flatten(0, 1 if handle.masked else 0)[handle.is_row(rank).cpu()]


def as_words(scales):
    """Column-major scales, as if they lay by rows."""
    return scales.contiguous().view(torch.int32) if scales.dtype == torch.float8_e8m0fnu else scales


def fp8_case(seed, **settings):
    case = LowLatencyCase(seed, **settings)
    case.dtype = torch.bfloat16
    case.hidden = case.random.choice([case.hidden, 7, 130, 512, 1024])
    if case.device == "cuda" and case.seed % 2:  # rows for the copy engine, of one chunk or several
        case.hidden = case.random.choice([3600, 4096, 7168, 8192])
    case.max_tokens = min(case.max_tokens, 40)
    return case


def check(case, low_latency, x, ids, weights, quantized, **options):
    """Whether these values and scales arrive where they are to."""
    values, scales = quantized
    if "scales" in options:
        options["scales"] = case.there(options["scales"])
    received = low_latency.dispatch(*map(case.there, (x, ids, weights)), **case.dispatch_options(), **options)
    expected, probs, counts = reference.dispatch(list(values), ids, weights, case.num_experts)
    expected_scales, _, _ = reference.dispatch(list(scales), ids, weights, case.num_experts)
    column = options.get("scale_layout") == "column"
    for rank in range(case.world):
        assert torch.equal(received.recv_counts[rank].cpu(), counts[rank].int())
        assert_same(rows_of(received, received.x, rank), expected[rank])
        assert torch.equal(rows_of(received, received.probs, rank), probs[rank])
        ours = received.scales[rank]
        if column:
            assert ours.stride(-2) == 1 and ours.stride(-1) * 4 % 16 == 0
            assert_same(rows_of(received, received.scales, rank), as_words(expected_scales[rank]))
        else:
            assert ours.is_contiguous()
            assert_same(rows_of(received, received.scales, rank), expected_scales[rank])


@pytest.mark.parametrize("block", range(4))
def test_equals_reference(block, device):
    for seed in range(8 * block, 8 * block + 8):
        case = fp8_case(4000 + seed, device=device)
        with case.cluster() as cluster:
            low_latency = case.low_latency(cluster)
            for fp8 in (*SCALE_FORMATS, None):
                ids, weights, x = case.new_round()
                x = [extremes(rows.shape, case.generator) for rows in x]
                scale_format = fp8 or case.random.choice(SCALE_FORMATS)
                expected = tuple(zip(*(reference.quantize(rows, scale_format) for rows in x), strict=True))
                column = scale_format != "ue8m0" or case.hidden % 512 == 0
                options = {"fp8": fp8, "scale_layout": case.random.choice(["row", "column"] if column else ["row"])}
                if fp8 is None:
                    x, options["scales"] = expected
                check(case, low_latency, x, ids, weights, expected, **options)


def test_a_row_beyond_the_limit_is_left_out_and_touches_nothing():
    case = fp8_case(4100)
    case.masked, case.layout, case.hidden = False, "grouped", 200
    ids, _, x = case.new_round()
    with case.cluster() as cluster:
        low_latency = case.low_latency(cluster)
        whole = low_latency.dispatch(x, ids, fp8="fp32", scale_layout="column", layout="grouped")
        limit = max(1, max(int(counts.sum()) for counts in whole.recv_counts) // 2)
        cut = low_latency.dispatch(x, ids, fp8="fp32", scale_layout="column", layout="grouped", max_recv_tokens=limit)
        for rank in range(case.world):
            rows = int(min(limit, whole.recv_counts[rank].sum()))
            assert_same(cut.x[rank][:rows], whole.x[rank][:rows])
            assert torch.equal(cut.scales[rank][:rows], whole.scales[rank][:rows])


class Expert(torch.autograd.Function):
    """An expert in float8: sees values and scales, and makes the gradient of what they stand for."""

    @staticmethod
    def forward(ctx, straight_through, values, scales, weight):
        rows = float8.dequantize(values, scales, dtype=torch.float32)
        ctx.save_for_backward(rows, weight)
        return (rows * weight).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        return (grad * weight).bfloat16(), None, None, (grad * rows).sum().reshape(1)


@pytest.mark.parametrize("options", [{"layout": "masked", "scale_layout": "column"}, {"layout": "grouped"}])
@pytest.mark.parametrize("ready_made", [False, True])
def test_the_gradient_goes_straight_through(options, ready_made):
    """As if the rows had been bfloat16, and the expert the same."""
    generator = torch.Generator().manual_seed(1)
    tokens, world = [3, 0, 2, 4], 4
    ids = [torch.rand(t, 8, generator=generator).topk(3, dim=1).indices for t in tokens]
    ids = [torch.where(torch.rand(i.shape, generator=generator) < 0.2, -1, i) for i in ids]
    x = [torch.randn(t, 200, generator=generator).bfloat16().requires_grad_() for t in tokens]
    weights = [torch.rand(t, 3, generator=generator).requires_grad_() for t in tokens]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=8)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=200, topk=3)
        received = low_latency.dispatch(x, ids, weights, fp8="pow2", **options)
        scale = torch.full((1,), 0.75, requires_grad=True)
        out = []
        for rank in range(world):
            stand_in, rows = received.straight_through[rank], (received.x[rank], received.scales[rank])
            assert not rows[0].requires_grad and not rows[1].requires_grad
            assert stand_in.dtype == torch.bfloat16 and stand_in.shape == rows[0].shape
            assert stand_in.untyped_storage().nbytes() == 2
            if ready_made:
                out.append((float8.dequantize(*rows, torch.float32, stand_in) * scale).bfloat16())
            else:
                out.append(Expert.apply(stand_in, *rows, scale))
        y = low_latency.combine(out, received.handle, [w.detach() for w in weights])
        grads = [torch.randn(rows.shape, generator=generator).bfloat16() for rows in y]
        probs = sum((p * p).sum() for p in received.probs)
        torch.autograd.backward([*y, probs], [*grads, torch.ones(())])
        plain = [rows.detach().clone().requires_grad_() for rows in x]
        again = low_latency.dispatch(plain, ids, layout=options["layout"])
        y = low_latency.combine(
            [(rows * 0.75).bfloat16() for rows in again.x], again.handle, [w.detach() for w in weights]
        )
        torch.autograd.backward(y, grads)
    for rank in range(world):
        assert x[rank].grad.dtype == torch.bfloat16 and torch.equal(x[rank].grad, plain[rank].grad)
        is_row = ids[rank] >= 0
        assert torch.equal(weights[rank].grad, torch.where(is_row, 2 * weights[rank].detach(), 0.0))
    assert scale.grad.isfinite() and scale.grad != 0


def test_the_weights_gradient_alone():
    """Of float8 rows, and of bfloat16 rows that need none."""
    ids = torch.tensor([[0, 2], [1, -1]])
    x = torch.randn(2, 130).bfloat16()
    values, scales = reference.quantize(x, "ue8m0")
    values.requires_grad_()
    with ep.LocalCluster(1, 1, ep.Config(num_experts=4)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=2, hidden=130, topk=2)
        for rows, options in ((x, {"fp8": "ue8m0"}), (values, {"scales": [scales]})):
            weights = torch.rand(2, 2).requires_grad_()
            received = low_latency.dispatch([rows], [ids], [weights], **options)
            assert received.straight_through is None
            (received.probs[0] ** 2).sum().backward()
            assert torch.equal(weights.grad, torch.where(ids >= 0, 2 * weights.detach(), 0.0))
            assert not received.x[0][3].view(torch.uint8).any()  # no token, and a gradient: zeros
    assert values.grad is None
    assert not any(torch.is_tensor(t) and t.requires_grad for t in (received.x[0], received.scales[0]))


def test_mistakes_are_named():
    x = [torch.randn(3, 130).bfloat16(), torch.randn(2, 130).bfloat16()]
    ids = [torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)]
    values, scales = (list(part) for part in zip(*(reference.quantize(rows) for rows in x), strict=True))
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=130, topk=1)
        long = [torch.zeros(t, 300, dtype=torch.float8_e4m3fn) for t in (3, 2)]
        for rows, options, message in (
            (x, {"fp8": "e4m3"}, "fp8 is 'e4m3', must be None or one of 'fp32', 'pow2', 'ue8m0'"),
            (x, {"fp8": "fp32", "scales": scales}, "scales must not be given with fp8='fp32'"),
            ([t.float() for t in x], {"fp8": "fp32"}, "x is torch.float32, must be torch.bfloat16 with fp8"),
            (x, {"scales": scales}, "scales must be given only with x of torch.float8_e4m3fn"),
            (values, {}, "scales must be given with x of torch.float8_e4m3fn"),
            (
                values,
                {"scales": [t[:, :1].contiguous() for t in scales]},
                r"scales has shape \(3, 1\), must be \(3, 2\)",
            ),
            (x, {"scale_layout": "column"}, "scale_layout is 'column', must be left out where there are no scales"),
            (x, {"fp8": "fp32", "scale_layout": "mn"}, "scale_layout is 'mn', must be one of 'row', 'column'"),
            (x, {"fp8": "ue8m0", "scale_layout": "column"}, "x has H = 130, must be a multiple of 512"),
            (long, {"scales": [torch.ones(t, 3) for t in (3, 2)]}, "x has rows of 300 x torch.float8_e4m3fn"),
        ):
            with pytest.raises(ValueError, match=message):
                low_latency.dispatch(rows, ids, **options)
        received = low_latency.dispatch(x, ids, fp8="fp32")  # nothing was sent, nothing is lost
        assert received.recv_counts[0].tolist() == [5]
