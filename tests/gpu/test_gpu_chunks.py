"""A layer in two chunks on a GPU, and with weight gradients beside the backward pass of dispatch: outputs and gradients
of the layer without them, however long each stream takes. Ranks share a GPU where there are too few."""

import pytest
import torch
from skips import missing

from megatron_ep.tools.local_ranks import LocalRanks

pytestmark = pytest.mark.needs(missing("megatron.core"))

ROUNDS = 6


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(2, 240) as ranks:
        yield ranks


class Delays:
    """While it is open, streams sleep for random times before and after dispatch, combine and weight gradients."""

    def __init__(self, generator):
        self._generator = generator

    def _sleep(self):
        torch.cuda._sleep(int(torch.randint(1, 2_000_000, (1,), generator=self._generator)))

    def around(self, call):
        def delayed(*given, **settings):
            self._sleep()
            result = call(*given, **settings)
            self._sleep()
            return result

        return delayed


def _compare(number, delays):
    from contextlib import ExitStack
    from unittest import mock

    import torch.distributed as dist
    from counted_experts import CountedExperts, make_layer
    from delayed_experts import DelayedExperts
    from gpu_layers import join, make_config
    from shared_settings import configured

    from megatron_ep.megatron import chunks
    from megatron_ep.normal import plan

    join()
    generator = torch.Generator().manual_seed(dist.get_rank())
    with configured(num_sms=4, timeout=60.0):
        plain = make_layer(make_config()).cuda()
    config = make_config()
    setattr(config, chunks.DELAYS, delays)
    with configured(num_sms=4, timeout=60.0, moe_chunks=number):
        layer = make_layer(config, experts=DelayedExperts if delays else CountedExperts).cuda()
        layer.load_state_dict(plain.state_dict())
        random = Delays(torch.Generator().manual_seed(7 + dist.get_rank()))
        for tokens in range(96, 96 + ROUNDS):
            x, grad = torch.randn(2, tokens + 9 * dist.get_rank(), 1, 256, generator=generator).cuda()
            results = []
            for each in (plain, layer):
                each.zero_grad()
                leaf = x.clone().requires_grad_()
                with ExitStack() as stack:
                    if each is layer:
                        for kind in (plan.DispatchPlan, plan.CombinePlan):
                            stack.enter_context(mock.patch.object(kind, "run", random.around(kind.run)))
                        stack.enter_context(
                            mock.patch.object(DelayedExperts, "backward_dw", random.around(DelayedExperts.backward_dw))
                        )
                    output, _ = each(leaf)
                    output.backward(grad)
                results.append([output.detach(), leaf.grad, *(parameter.grad for parameter in each.parameters())])
            for ours, theirs in zip(results[1], results[0], strict=True):
                assert (ours is None) == (theirs is None)
                if theirs is not None:
                    off = (ours - theirs).abs().max() / theirs.abs().max()
                    assert off <= 1e-4, (tokens, off)  # products of fewer rows may sum in another order


@pytest.mark.parametrize(("number", "delays"), [(2, False), (1, True), (2, True)])
def test_the_layer_without_chunks(ranks, number, delays):
    ranks.run(_compare, number, delays)
