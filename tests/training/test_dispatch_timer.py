"""What times the dispatchers of a model, for tests/gpu/train_slice.py."""

import runpy
import time
from pathlib import Path

import pytest
import torch

DispatchTimer = runpy.run_path(str(Path(__file__).parents[1] / "gpu" / "dispatch_timer.py"))["DispatchTimer"]


class _Slow(torch.autograd.Function):
    """Identity that takes a while in both directions and keeps account. Time passes in it alone."""

    now = 0.0

    @staticmethod
    def forward(ctx, x, seconds, account):
        ctx.seconds, ctx.account = seconds, account
        _Slow._sleep(seconds, account)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _Slow._sleep(2 * ctx.seconds, ctx.account)
        return grad, None, None

    @staticmethod
    def _sleep(seconds, account):
        _Slow.now += seconds
        account.append(seconds)


class _Dispatcher:
    def __init__(self, account):
        self.account = account

    def _step(self, x):
        return _Slow.apply(x, 0.005, self.account)

    def dispatch_preprocess(self, x, routing_map, probs):
        return self._step(x), probs

    def token_dispatch(self, x, probs):
        return self._step(x), probs

    def dispatch_postprocess(self, x, probs):
        return self._step(x), [1, 2], probs

    combine_preprocess = token_combine = combine_postprocess = _step


class _Layer(torch.nn.Module):
    def __init__(self, dispatching, computing):
        super().__init__()
        self.token_dispatcher, self.computing = _Dispatcher(dispatching), computing

    def forward(self, x, probs):
        dispatcher = self.token_dispatcher
        x, probs = dispatcher.dispatch_preprocess(_Slow.apply(x, 0.1, self.computing), None, probs)
        x, probs = dispatcher.token_dispatch(x, probs)
        x, _, probs = dispatcher.dispatch_postprocess(x, probs)
        x = _Slow.apply(x * probs, 0.1, self.computing)
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(x)))


@pytest.mark.parametrize("layers", [1, 2])
def test_dispatch_timer_counts_the_steps_and_nothing_else(layers, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: _Slow.now)
    dispatching, computing = [], []
    model = torch.nn.ModuleList([_Layer(dispatching, computing) for _ in range(layers)])
    timer = DispatchTimer(model, "cpu")
    x, probs = torch.randn(4, 3, requires_grad=True), torch.rand(4, 1, requires_grad=True)
    y = x * 1
    for layer in model:
        y = layer(y, probs)
    assert len(dispatching) == 6 * layers
    assert timer.seconds == pytest.approx(sum(dispatching))
    y.square().sum().backward()
    assert len(dispatching) == 12 * layers
    assert timer.seconds == pytest.approx(sum(dispatching))
    torch.testing.assert_close(y, x * probs**layers)
    torch.testing.assert_close(x.grad, 2 * y * probs**layers)
    torch.testing.assert_close(probs.grad, (2 * y * x * layers * probs ** (layers - 1)).sum(1, keepdim=True))
