"""A plan's tables against what counting row by row gives: who sends what where, and which keys a query meets."""

import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ep.sequences.plan import SequencePlan, Shard, shards_of_distca

MANY = settings(max_examples=30, deadline=None)


@st.composite
def cases(draw):
    """(shards in any order, world): short documents of few shards, and some that go to more than 9 ranks."""
    world = draw(st.integers(1, 14))
    ranks = st.integers(0, world - 1)
    documents = draw(st.lists(st.lists(st.tuples(ranks, ranks, st.integers(0, 4)), max_size=14), max_size=6))
    names = draw(st.permutations(range(0, 5 * len(documents), 5)))
    shards = [
        Shard(document, index, *values)
        for document, cut in zip(names, documents, strict=True)
        for index, values in enumerate(cut)
    ]
    return draw(st.permutations(shards)), world


COPIES = ([Shard(0, i, 11 - i, i, 3) for i in range(12)], 12)  # every rank needs the first shard
ON_ONE_RANK = ([Shard(d, i, (d + i) % 3, 1, 2 + i) for d in range(3) for i in range(3)], 3)
ONE_SHARD = ([Shard(7, 0, 1, 0, 5)], 2)
NO_ROWS = ([Shard(0, 0, 0, 1, 0), Shard(0, 1, 1, 1, 0)], 2)
AN_EMPTY_SHARD_BETWEEN = ([Shard(0, 0, 0, 1, 2), Shard(0, 1, 0, 2, 0), Shard(0, 2, 0, 1, 3)], 3)
CONTEXTS_THAT_OVERLAP = ([Shard(0, i, 0, i % 2, 2) for i in range(4)] + [Shard(1, 0, 1, 0, 3)], 2)


def with_examples(test):
    cases = (COPIES, ON_ONE_RANK, ONE_SHARD, NO_ROWS, AN_EMPTY_SHARD_BETWEEN, CONTEXTS_THAT_OVERLAP, ([], 3))
    for case in cases:
        test = example(case)(test)
    return test


def rows_of(shards):
    """Every row as (document, place in it, home rank, attention rank), in the order of (document, index)."""
    rows, place = [], {}
    for shard in sorted(shards, key=lambda shard: (shard.document, shard.index)):
        for _ in range(shard.length):
            at = place[shard.document] = place.get(shard.document, -1) + 1
            rows.append((shard.document, at, shard.home_rank, shard.attention_rank))
    return rows


def at_home(rows, rank):
    return [row[:2] for row in rows if row[2] == rank]


def queries(rows, rank):
    return [row[:2] for row in rows if row[3] == rank]


def keys(rows, rank):
    """The rows that a query of the rank attends to, each once."""
    return [(d, at) for d, at, _, _ in rows if any(d == e and at <= last for e, last in queries(rows, rank))]


def sent(routes):
    """For each row in order, its (rank, row) there."""
    return [
        [(rank, row) for rank, row in zip(*pair, strict=True) if rank >= 0]
        for pair in zip(*(table.tolist() for table in routes.per_row()), strict=True)
    ]


@MANY
@given(cases())
@with_examples
def test_every_row_goes_where_counting_says(case):
    shards, world = case
    plan, rows = SequencePlan.build(shards, world), rows_of(shards)
    in_order = sorted(shards, key=lambda shard: (shard.document, shard.index))
    assert SequencePlan.build(iter(in_order), world).digest() == plan.digest(), "the order of shards changes nothing"
    q_at = [{row: at for at, row in enumerate(queries(rows, rank))} for rank in range(world)]
    kv_at = [{row: at for at, row in enumerate(keys(rows, rank))} for rank in range(world)]
    home_at = {row: (rank, at) for rank in range(world) for at, row in enumerate(at_home(rows, rank))}
    for rank in range(world):
        tables, home = plan.of_rank(rank), at_home(rows, rank)
        assert sent(tables.q) == [[(r, q_at[r][row]) for r in range(world) if row in q_at[r]] for row in home]
        assert sent(tables.kv) == [[(r, kv_at[r][row]) for r in range(world) if row in kv_at[r]] for row in home]
        assert sent(tables.out) == [[home_at[row]] for row in q_at[rank]]
        assert sent(tables.kv_grad) == [[home_at[row]] for row in kv_at[rank]]
        assert (tables.num_rows, tables.num_q_rows, tables.num_kv_rows) == (
            len(home),
            len(q_at[rank]),
            len(kv_at[rank]),
        )
        for dst in range(world):
            assert plan.q_rows[rank, dst] == sum(row in q_at[dst] for row in home)
            assert plan.kv_rows[rank, dst] == sum(row in kv_at[dst] for row in home)
        assert plan.attention_pairs[rank] == sum(at + 1 for _, at in q_at[rank])
    assert plan.max_copies == max((sum(row in at for at in kv_at) for row in home_at), default=0)


@MANY
@given(cases())
@with_examples
def test_every_query_meets_exactly_its_causal_keys_in_order(case):
    shards, world = case
    plan, rows = SequencePlan.build(shards, world), rows_of(shards)
    for rank in range(world):
        tables, received = plan.of_rank(rank), keys(rows, rank)
        if tables.context_rows is not None:
            received = [received[row] for row in tables.context_rows.tolist()]
        q_starts, k_starts = tables.cu_seqlens_q.tolist(), tables.cu_seqlens_k.tolist()
        assert q_starts[-1] == tables.num_q_rows and k_starts[-1] == len(received)
        met = []
        for i in range(len(q_starts) - 1):
            num_q, num_k = q_starts[i + 1] - q_starts[i], k_starts[i + 1] - k_starts[i]
            assert 0 < num_q <= tables.max_seqlen_q and num_k <= tables.max_seqlen_k
            for query in range(num_q):
                seen = num_k - num_q + query + 1  # causal from the bottom right
                met.append(received[k_starts[i] : k_starts[i] + seen])
        assert met == [[(d, before) for before in range(at + 1)] for d, at in queries(rows, rank)]


def test_contexts_are_read_as_they_lie_unless_they_overlap():
    overlapping = SequencePlan.build(*CONTEXTS_THAT_OVERLAP).of_rank(0)
    assert overlapping.num_kv_rows == 9
    assert overlapping.context_rows.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert SequencePlan.build(*AN_EMPTY_SHARD_BETWEEN).of_rank(1).context_rows is None


def test_tables_are_int32():
    tables = SequencePlan.build(*COPIES).of_rank(0)
    for routes in (tables.q, tables.kv, tables.out, tables.kv_grad):
        assert {table.dtype for table in (*routes, *routes.per_row())} == {torch.int32}
    assert tables.cu_seqlens_q.dtype == tables.cu_seqlens_k.dtype == torch.int32


GOOD = [Shard(3, 0, 0, 1, 4), Shard(3, 1, 1, 0, 4), Shard(8, 0, 1, 1, 2)]


@pytest.mark.parametrize(
    ("i", "change", "why"),
    [
        (0, {"home_rank": 2}, "whose home_rank must be below world = 2"),
        (1, {"attention_rank": 2}, "whose attention_rank must be below world = 2"),
        (2, {"attention_rank": -1}, "whose attention_rank must be an int in [0, 2147483647]"),
        (1, {"length": -1}, "whose length must be an int in [0, 2147483647]"),
        (1, {"length": 4.0}, "whose length must be an int in [0, 2147483647]"),
        (1, {"length": True}, "whose length must be an int in [0, 2147483647]"),
        (0, {"document": 1 << 40}, "whose document must be an int in [0, 2147483647]"),
        (1, {"index": 2}, "whose index must be below 2, as many shards as its document has"),
        (2, {"index": 1}, "whose index must be below 1, as many shards as its document has"),
        (1, {"index": 0}, "which has the document and the index of shards[0]"),
        (0, {"length": (1 << 31) - 1}, "whose document has more than 2147483647 rows"),
    ],
)
def test_a_wrong_shard_is_named(i, change, why):
    shards = list(GOOD)
    shards[i] = replace(shards[i], **change)
    with pytest.raises(ValueError, match=re.escape(f"shards[{i}] is {shards[i]}, {why}")):
        SequencePlan.build(shards, 2)


def test_other_mistakes_are_told():
    with pytest.raises(ValueError, match=re.escape("shards[1] is (3, 1, 1, 0, 4), must be a Shard")):
        SequencePlan.build([GOOD[0], (3, 1, 1, 0, 4)], 2)
    with pytest.raises(ValueError, match="world is 0, must be an int in"):
        SequencePlan.build(GOOD, 0)
    with pytest.raises(ValueError, match="shards is None, must be a list"):
        SequencePlan.build(None, 2)
    with pytest.raises(ValueError, match=re.escape("rank is 2, must be an int in [0, 1]")):
        SequencePlan.build(GOOD, 2).of_rank(2)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(d, 0, 0, d, 1 << 30) for d in range(2)], "shards whose home_rank is 0 have 2147483648 rows"),
        ([Shard(d, 0, d, 1, 1 << 30) for d in range(2)], "shards whose attention_rank is 1 have 2147483648 rows"),
        (
            [Shard(d, i, d, (1 - i) * (1 + d), 1 if i else 1 << 30) for d in range(2) for i in range(2)],
            "rank 0 would receive 2147483650 rows of K and V",
        ),
        ([Shard(0, i, 0, i % 2, 1 << 29) for i in range(3)], "the segments of rank 0 have 2147483648 rows of context"),
    ],
)
def test_more_rows_than_tables_can_say(shards, message):
    with pytest.raises(ValueError, match=f"{message}, must be at most 2147483647"):
        SequencePlan.build(shards, 3)


def test_a_plan_of_distca():
    fields = ("rid", "dispatch_rid", "logical_sid", "shard_len")
    plan = [[(0, 1, 1, 4), (0, 0, 0, 6)], [(1, 1, 0, 3)]]
    shards = shards_of_distca([[SimpleNamespace(**dict(zip(fields, s, strict=True))) for s in d] for d in plan])
    assert shards == [Shard(0, 1, 0, 1, 4), Shard(0, 0, 0, 0, 6), Shard(1, 0, 1, 1, 3)]
    assert SequencePlan.build(shards, 2).kv_rows.tolist() == [[6, 10], [0, 3]]


def test_ten_thousand_documents_on_512_ranks():
    """A tenth of a second; the bound is for a machine that does other things."""
    choice = random.Random(0)
    shards = [
        Shard(document, index, choice.randrange(512), choice.randrange(512), choice.randrange(1, 5000))
        for document in range(10_000)
        for index in range(choice.choice((1, 1, 1, 2, 3, 8)))
    ]
    began = time.process_time()
    plan = SequencePlan.build(shards, 512)
    assert time.process_time() - began < 2
    assert int(plan.q_rows.sum()) == sum(shard.length for shard in shards)
    assert plan.of_rank(511).num_rows == sum(shard.length for shard in shards if shard.home_rank == 511)
