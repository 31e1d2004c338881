"""Entries of send queues, read by another program than the one that wrote them: a decoder made from the format of mlx5
network cards (mlx5dv.h) executes a queue on a model of the two ranks' memory, and finds what the software card left."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass

import cpp
import pytest

REGION, ENTRY, DOORBELL, BELL, COMPLETION = 1 << 20, 64, 8, 8, 64
WRITE, FETCH_ADD = 0x08, 0x12  # MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_ATOMIC_FA
CONTROL = struct.Struct(">IIBxxBI")  # mlx5_wqe_ctrl_seg: opmod_idx_opcode, qpn_ds, signature, fm_ce_se, imm
REMOTE = struct.Struct(">QIxxxx")  # mlx5_wqe_raddr_seg: raddr, rkey
DATA = struct.Struct(">IIQ")  # mlx5_wqe_data_seg: byte_count, lkey, addr
ATOMIC = struct.Struct(">QQ")  # mlx5_wqe_atomic_seg: swap_add, compare
SEGMENT = 16


@dataclass
class Executor:
    """A card that knows one queue, and one region at each end, with keys for data and for flags."""

    own: bytes
    other: bytearray
    queue: int
    source: int = 0  # keys at this end
    scratch: tuple[int, int, int] = (8, 0, 0)  # bytes, key, address
    data: int = 0  # keys at the other end
    flags: int = 0
    executed: int = 0

    def execute(self, entry: bytes) -> None:
        what, size, signature, flags, immediate = CONTROL.unpack_from(entry)
        opcode, index, modifier = what & 0xFF, what >> 8 & 0xFFFF, what >> 24
        assert (signature, flags, immediate, modifier) == (0, 8, 0, 0)  # 8: MLX5_WQE_CTRL_CQ_UPDATE
        assert index == self.executed % (1 << 16) and size >> 8 == self.queue
        address, key = REMOTE.unpack_from(entry, SEGMENT)
        assert key == (self.data if opcode == WRITE else self.flags) and not any((*entry[9:11], *entry[28:32]))
        if opcode == WRITE:
            assert size & 0xFF == 3 and not any(entry[3 * SEGMENT :])
            count, local_key, source = DATA.unpack_from(entry, 2 * SEGMENT)
            assert local_key == self.source and source + count <= len(self.own) and address + count <= len(self.other)
            self.other[address : address + count] = self.own[source : source + count]
        else:
            assert opcode == FETCH_ADD and size & 0xFF == 4 and address % 8 == 0
            increment, compare = ATOMIC.unpack_from(entry, 2 * SEGMENT)
            assert compare == 0 and DATA.unpack_from(entry, 3 * SEGMENT) == self.scratch
            (before,) = struct.unpack_from("<Q", self.other, address)
            struct.pack_into("<Q", self.other, address, (before + increment) % (1 << 64))
        self.executed += 1


@pytest.mark.parametrize(("seed", "entries"), [(1, 300), (2, 1), (3, 70_000)])
def test_another_decoder_finds_the_same(seed: int, entries: int) -> None:
    program = cpp.build("send_queue") / "send_queue"
    dumped = subprocess.run([program, "dump", str(seed), str(entries)], check=True, capture_output=True).stdout
    assert len(dumped) == 2 * REGION + entries * ENTRY + DOORBELL + COMPLETION
    own, rest = dumped[:REGION], dumped[REGION:]
    queue = 2 * 1  # that for puts of channel 0 to rank 1
    card = Executor(own, bytearray(REGION), queue)
    for start in range(0, entries * ENTRY, ENTRY):
        card.execute(rest[start : start + ENTRY])
    doorbell, completion = rest[entries * ENTRY :][:DOORBELL], rest[entries * ENTRY + DOORBELL :][:COMPLETION]
    assert doorbell == struct.pack(">II", 0, entries % (1 << 16))  # MLX5_SND_DBR is the second word
    wqe_counter, op_own = struct.unpack_from(">HxB", completion, 60)  # mlx5_cqe64
    assert wqe_counter == (entries - 1) % (1 << 16) and op_own >> 4 == 0  # MLX5_CQE_REQ
    assert card.other == rest[-REGION:]


@pytest.mark.parametrize(("seed", "entries"), [(1, 300), (2, 1), (3, 70_000)])
def test_entries_for_a_card_have_its_number_and_keys(seed: int, entries: int) -> None:
    program = cpp.build("send_queue") / "send_queue"
    dumped = subprocess.run([program, "dump_card", str(seed), str(entries)], check=True, capture_output=True).stdout
    assert len(dumped) == 2 * REGION + entries * ENTRY + DOORBELL + BELL
    own, rest, after = dumped[:REGION], dumped[REGION:], dumped[REGION + entries * ENTRY :]
    card = Executor(own, bytearray(REGION), 0xABCDEF, source=0x33, scratch=(8, 0x44, 0x1000), data=0x11, flags=0x22)
    for start in range(0, entries * ENTRY, ENTRY):
        card.execute(rest[start : start + ENTRY])
    assert after[:DOORBELL] == struct.pack(">II", 0, entries % (1 << 16))
    assert after[DOORBELL:][:BELL] == rest[(entries - 1) * ENTRY :][:BELL]  # the last entry's first bytes
    assert card.other == after[DOORBELL + BELL :]
