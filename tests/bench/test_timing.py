"""The loop that times, with clocks that are not real."""

import random
import time

from megatron_ep.tools.bench.timing import host_timer, time_rounds


def test_everything_takes_its_turn_and_the_first_rounds_do_not_count():
    calls, asked = [], []

    def timer(name):
        def run():
            calls.append(name)
            number = calls.count(name)
            return lambda: asked.append(name) or 10.0 * number

        return run

    timers = {"a": timer("a"), "b": timer("b")}
    seconds = time_rounds(timers, 1, 2, when_warm=lambda: calls.append("warm"))
    assert calls == ["a", "b", "warm", "a", "b", "a", "b"]
    assert seconds == {"a": [20.0, 30.0], "b": [20.0, 30.0]}
    assert asked == ["a", "a", "b", "b"], "a reading that waits for a GPU is asked at the end"


def test_a_shuffled_order_is_everybodys_in_every_round():
    calls = []
    timers = {name: lambda name=name: calls.append(name) or (lambda: 1.0) for name in "abcd"}
    seconds = time_rounds(timers, 0, 20, shuffler=random.Random(0))
    rounds = ["".join(calls[i : i + 4]) for i in range(0, 80, 4)]
    assert len(set(rounds)) > 3 and all(sorted(order) == list("abcd") for order in rounds)
    assert list(seconds) == list("abcd")


def test_the_hosts_clock_runs_between_before_and_after(monkeypatch):
    clock, freed = [0.0], []

    class Result:
        def __del__(self):
            freed.append(clock[0])

    def takes(seconds):
        clock[0] += seconds
        return Result()

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timer = host_timer(lambda: takes(2), before=lambda: takes(100) and None, after=lambda: takes(3) and None)
    freed.clear()
    assert timer()() == 5
    assert freed[-1] == 105, "what the step returned lives until the clock has stopped"
