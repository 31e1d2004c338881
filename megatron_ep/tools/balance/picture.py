"""A picture of a trace: max/mean over steps, and for each layer how much of it lasts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ep.tools.balance.spread import LayerSpread, of_passes
from megatron_ep.tools.balance.trace import Trace


def draw(trace: Trace, layers: Sequence[LayerSpread], file: str) -> None:
    """Raises OSError and ValueError: the file cannot be written, or is of no known kind."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (over_steps, over_layers) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    steps, spread = of_passes(trace)
    numbers = np.unique(steps)
    levels = np.array([np.quantile(spread[steps == number], (0.05, 0.5, 0.95)) for number in numbers])
    over_steps.fill_between(numbers, levels[:, 0], levels[:, 2], alpha=0.25, label="nine of ten passes")
    over_steps.plot(numbers, levels[:, 1], label="half of them")
    over_steps.set(xlabel="step", ylabel="rows of the rank with the most, over the mean")
    over_steps.legend()

    places = np.arange(len(layers))
    lasting = np.array([layer.lasting - 1 for layer in layers])
    momentary = np.array([layer.momentary for layer in layers])
    over_layers.bar(places, lasting, label="lasting")
    over_layers.bar(places, momentary, bottom=lasting, label="momentary")
    shown = places[:: -(-len(layers) // 16)]
    over_layers.set_xticks(shown, [str(layers[place].layer) for place in shown])
    over_layers.set(xlabel="layer", ylabel="over the mean, beyond 1")
    over_layers.legend()
    figure.suptitle(f"{trace.expert_ranks} ranks, {trace.num_experts} experts, top-{trace.topk}")
    try:
        figure.savefig(file, dpi=120)
    finally:
        pyplot.close(figure)
