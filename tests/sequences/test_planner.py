"""Balanced attention: what may never happen for any shards, and what is gained for the lengths of real documents."""

import random
import re

import pytest
from document_lengths import lengths
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ep.sequences.plan import SequencePlan, Shard
from megatron_ep.sequences.planner import RowBytes, balance, bytes_between, computed_at_home, cut_evenly

LENGTHS = lengths()
ROW_BYTES = RowBytes(q=64 * 128 * 2, kv=2 * 8 * 128 * 2, out=64 * 128 * 2)  # GQA, bf16


@st.composite
def cases(draw):
    """(shards, world, block, max_bytes): long and short documents, at home in pieces on ranks by chance."""
    world = draw(st.integers(1, 8))
    rows = st.one_of(st.integers(0, 8), st.integers(0, 400))
    documents = draw(st.lists(st.lists(st.tuples(st.integers(0, world - 1), rows), max_size=5), max_size=10))
    shards = [Shard(d, i, rank, 0, n) for d, cut in enumerate(documents) for i, (rank, n) in enumerate(cut)]
    return shards, world, draw(st.integers(1, 40)), draw(st.none() | st.integers(0, 8000))


def rows_at_home(shards):
    """The home rank of each row of each document."""
    homes = {}
    for shard in sorted(shards, key=lambda shard: (shard.document, shard.index)):
        if shard.length:
            homes.setdefault(shard.document, []).extend([shard.home_rank] * shard.length)
    return homes


def cuts(shards):
    """(document, row) where shards meet."""
    row, places = {}, set()
    for shard in sorted(shards, key=lambda shard: (shard.document, shard.index)):
        row[shard.document] = row.get(shard.document, 0) + shard.length
        places.add((shard.document, row[shard.document]))
    return places


@settings(max_examples=40, deadline=None)
@given(cases())
@example(([], 3, 1, None))
@example(([Shard(0, 0, 0, 0, 400)], 8, 16, None))
@example(([Shard(0, 0, 0, 0, 400), Shard(1, 0, 0, 0, 100), Shard(2, 0, 1, 0, 30)], 4, 16, 700))
@example(([Shard(0, 0, 0, 0, 300), Shard(0, 1, 1, 0, 300), Shard(0, 2, 0, 0, 300)], 4, 8, 2000))
def test_what_holds_for_any_shards(case):
    shards, world, block, max_bytes = case
    row_bytes = RowBytes(q=5, kv=3, out=4)
    made = balance(shards, world, block=block, row_bytes=row_bytes, max_bytes=max_bytes)
    before, after = SequencePlan.build(computed_at_home(shards), world), SequencePlan.build(made, world)

    assert rows_at_home(made) == rows_at_home(shards)
    assert all(row % block == 0 for _, row in cuts(made) - cuts(shards))
    total = int(before.attention_pairs.sum())
    mean = -(-total // world)
    assert int(after.attention_pairs.sum()) == total
    for was, now in zip(before.attention_pairs.tolist(), after.attention_pairs.tolist(), strict=True):
        assert mean <= now <= was if was >= mean else was <= now <= mean
    if max_bytes is not None:
        for dim in (0, 1):
            was, now = (bytes_between(plan, row_bytes).sum(dim).tolist() for plan in (before, after))
            assert all(b <= max(a, max_bytes) for a, b in zip(was, now, strict=True))

    shuffled = list(shards)
    random.Random(0).shuffle(shuffled)
    assert balance(shuffled, world, block=block, row_bytes=row_bytes, max_bytes=max_bytes) == made


def test_bytes_between_ranks():
    """Two queries go, and come back, and need K and V of the five rows that they see."""
    plan = SequencePlan.build([Shard(0, 0, 0, 0, 3), Shard(0, 1, 0, 1, 2)], 2)
    assert bytes_between(plan, RowBytes(q=100, kv=10, out=1)).tolist() == [[0, 2 * 100 + 5 * 10], [2 * 1, 0]]


def test_documents_are_cut_evenly():
    assert cut_evenly([3, 0, 5], 3) == [Shard(0, 0, 0, 0, 3), Shard(2, 0, 1, 1, 3), Shard(2, 1, 2, 2, 2)]
    assert cut_evenly([], 3) == [] and cut_evenly([0], 3) == []
    assert [shard.length for shard in cut_evenly([4], 3)] == [2, 2]


def test_one_long_document_is_shared_by_all():
    """Its last queries go: a rank that computes an eighth of the work takes far fewer than an eighth of the rows."""
    plan = SequencePlan.build(balance([Shard(0, 0, 0, 0, 1 << 16)], 8), 8)
    load = plan.attention_pairs.double()
    assert load.max() / load.mean() < 1.05
    assert int(plan.q_rows[0, 1:].sum()) < 0.66 * (1 << 16)  # 1 - sqrt(1 / 8) of them


def test_what_is_balanced_stays():
    shards = [Shard(document, 0, document, document, 1000) for document in range(8)]
    assert balance(shards, 8) == shards


@pytest.mark.parametrize(("world", "before", "after"), [(8, 1.2, 1.001), (64, 1.8, 1.003), (512, 4.7, 1.06)])
def test_lengths_of_real_documents(world, before, after):
    shards = cut_evenly(LENGTHS, world)
    loads = [SequencePlan.build(s, world).attention_pairs.double() for s in (shards, balance(shards, world))]
    imbalance = [float(load.max() / load.mean()) for load in loads]
    assert imbalance[0] > before and imbalance[1] < after


def test_real_documents_under_a_bound():
    """Few bytes buy much: the last queries of the longest documents."""
    shards, most = cut_evenly(LENGTHS, 64), 2_000_000_000
    plan = SequencePlan.build(balance(shards, 64, row_bytes=ROW_BYTES, max_bytes=most), 64)
    load, moved = plan.attention_pairs.double(), bytes_between(plan, ROW_BYTES)
    assert load.max() / load.mean() < 1.35
    assert max(int(moved.sum(0).max()), int(moved.sum(1).max())) <= most


def test_keys_that_are_there_anyway_cost_nothing():
    """Rank 1 has queries behind those of rank 0, so that it receives their keys in any case."""
    shards = [Shard(0, 0, 0, 0, 300), Shard(0, 1, 1, 1, 10)]
    made = balance(shards, 2, block=10, row_bytes=RowBytes(q=1, kv=100, out=1), max_bytes=300 * 100 + 50)
    assert SequencePlan.build(made, 2).q_rows.tolist() == [[250, 50], [0, 10]]


def test_a_rank_that_is_full_for_one_may_take_from_another():
    """Rank 2 receives 900 rows of K and V anyway, then 1,000 and 200 of Q from rank 0. There is room for 250 more: too
    few for another block of rank 0, enough for a short document of rank 1."""
    shards = [Shard(0, 0, 3, 3, 900), Shard(0, 1, 2, 2, 1)]
    shards += [Shard(1 + document, 0, 0, 0, 1000) for document in range(3)]
    shards += [Shard(4 + document, 0, 1, 1, 100) for document in range(278)]
    plan = SequencePlan.build(balance(shards, 4, block=400, max_bytes=2350), 4)
    assert plan.q_rows[:, 2].tolist() == [200, 100, 1, 0]


def test_a_document_that_fits_nowhere_does_not_stop_shorter_ones():
    shards = [Shard(0, index, home, home, 250) for index, home in enumerate((1, 2, 3, 0))]
    shards += [Shard(1 + document, 0, 0, 0, 100) for document in range(10)]
    plan = SequencePlan.build(balance(shards, 5, block=10, max_bytes=1000), 5)
    assert plan.kv_rows[1, 4] == 0 and plan.q_rows[0, 4] >= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block": 0}, "block is 0, must be an int in"),
        ({"max_bytes": -1}, "max_bytes is -1, must be an int in"),
        ({"max_bytes": 1e9}, "max_bytes is 1000000000.0, must be an int in"),
        ({"row_bytes": RowBytes(1, 0, 1)}, "row_bytes.kv is 0, must be an int in"),
        ({"row_bytes": (1, 2, 3)}, "row_bytes is (1, 2, 3), must be a RowBytes"),
        ({"world": 0}, "world is 0, must be an int in"),
        ({"shards": [Shard(0, 1, 0, 0, 4)]}, "shards[0] is Shard(document=0, index=1,"),
        ({"shards": [Shard(0, 0, 2, 0, 4)]}, "shards[0] is Shard(document=0, index=0, home_rank=2,"),
        ({"shards": None}, "shards is None, must be a list"),
        ({"shards": [(0, 0, 0, 0, 4)]}, "shards[0] is (0, 0, 0, 0, 4), must be a Shard"),
    ],
)
def test_mistakes_are_told(arguments, message):
    arguments = {"shards": [Shard(0, 0, 0, 0, 4)], "world": 2, **arguments}
    with pytest.raises(ValueError, match=re.escape(message)):
        balance(arguments.pop("shards"), arguments.pop("world"), **arguments)


def test_a_wrong_length_is_named():
    with pytest.raises(ValueError, match=re.escape("lengths[1] is -2, must be an int in")):
        cut_evenly([3, -2], 2)
    with pytest.raises(ValueError, match="lengths is 5, must be a list"):
        cut_evenly(5, 2)


def test_generators_lose_no_document():
    shards = cut_evenly([400, 30, 80], 2)
    assert cut_evenly(iter([400, 30, 80]), 2) == shards
    assert balance(iter(shards), 2) == balance(shards, 2)
