#pragma once

#include "protocol/count_tables.h"
#include "protocol/low_latency_dispatch_send.h"

namespace ep {

// The receiving half of a low-latency dispatch: the choices of all ranks give every row its place,
// in the order of (expert, source rank, token). A piece is read once its tag arrives.

template <class W, class F>
EP_FN WaitCondition need_choices(const LowLatencyDispatch<F>& call, int rank, int part) {
    if (part && !call.fabric.maps(rank)) return nothing_to_wait_for();  // they came with part 0
    const size_t flag = call.heap().choice_flag(rank, part);
    const uint64_t value = acquire_flag<W>(call.fabric, call.heap().channels, rank, flag);
    return {call.fabric.maps(rank) ? value : ChoiceFlag{value}.sent(), call.number, rank};
}

template <class W, class F>
EP_FN WaitCondition need_all_choices(const LowLatencyDispatch<F>& call, int rank) {
    WaitCondition need = nothing_to_wait_for();
    for (int part = 0; part < call.heap().choice_parts() && is_met(need); ++part)
        need = need_choices<W>(call, rank, part);
    return need;
}

template <WarpLike W, class F>
EP_FN bool wait_choices(W& warp, const LowLatencyDispatch<F>& call) {
    for (int part = 0; part < call.heap().choice_parts(); ++part) {
        for (int first = 0; first < call.world(); first += 32) {
            const int lanes = lanes_from(first, call.world());
            if (part && !F::kMapsAll &&
                !warp.ballot(lanes, [&](int lane) { return call.fabric.maps(first + lane); }))
                continue;
            const bool here = wait_counted(warp, call, Wait::Choices, lanes, [&](int lane) {
                return need_choices<W>(call, first + lane, part);
            });
            if (!here) return false;
        }
    }
    return true;
}

template <WarpLike W, class F>
EP_FN bool may_receive(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    if (!call.masking()) return wait_choices(warp, call);
    return decide_membership(warp, call, team, LowLatencyHalf::Receive, Wait::Choices,
                             [&](int rank) {
                                 const WaitCondition choices = need_all_choices<W>(call, rank);
                                 return is_met(choices) ? need_rows<W>(call, rank) : choices;
                             });
}

// The choices that have reached this rank.
template <class F>
struct Choices {
    const LowLatencyDispatch<F>& call;
    int chunks = call.heap().chunks();
    int local_experts = call.heap().local_experts();

    EP_FN const uint32_t* of(int rank, size_t first) const {
        const LowLatencyHeap& heap = call.heap();
        if (!call.takes_part(LowLatencyHalf::Receive, rank))
            return call.fabric.template own<uint32_t>(heap.no_choices() + first);
        return written_by<uint32_t>(call.fabric, rank, heap.choices(call.bank, rank) + first);
    }
    EP_FN uint32_t present(int rank, int chunk) const {
        return of(rank, 0)[chunk] & call.heap().tokens_of_chunk(chunk);
    }
    // [K], expert ids of a token's choices.
    EP_FN const int32_t* experts(int rank, int token) const {
        const uint32_t* words = of(rank, 0);
        size_t before = popcount(words[token / 32] & ((uint32_t{1} << token % 32) - 1));
        for_each_load(
            token / 32, [&](int chunk) { return words[chunk]; },
            [&](int, uint32_t word) { before += popcount(word); });
        return reinterpret_cast<const int32_t*>(of(rank, call.heap().chosen_experts())) +
               before * call.args.format.topk;
    }
    // Line 0: rows for an expert; line 1 + chunk: bits of the chunk's tokens that chose it.
    EP_FN uint32_t word(int rank, int expert, int line) const {
        const int part = 1 + expert / 32;
        return of(rank, call.heap().choice_part(
                            part))[call.heap().experts_of_part(part) * line + expert % 32];
    }
};

// The larger of two counts of rows, with the rank that sent it in the low half.
EP_FN uint64_t larger_count(uint64_t most, uint32_t rows, int rank) {
    const uint64_t count = uint64_t{rows} << 32 | static_cast<uint32_t>(rank);
    return count > most ? count : most;
}

// Counts in each lane the rows of an expert. Unless all ranks are mapped, and so few, several lanes
// share the ranks if there are fewer experts than lanes. most: larger_count of a lane's loads.
template <WarpLike W, class F>
EP_FN void count_rows_of(W& warp, const Choices<F>& choices, int first, int lanes,
                         PerLane<W, int>& rows, PerLane<W, uint64_t>& most) {
    int sharing = 1;
    while (!F::kMapsAll && 2 * sharing * lanes <= 32) sharing *= 2;
    const int world = choices.call.world();
    PerLane<W, int> part;
    warp.lanes(sharing * lanes, [&](int lane) {
        const int expert = first + lane / sharing, own = lane % sharing;
        part[lane] = 0;
        for_each_load((world - own + sharing - 1) / sharing,
                      [&](int i) { return choices.word(own + i * sharing, expert, 0); },
                      [&](int i, uint32_t of_rank) {
                          part[lane] = sum_of(part[lane], static_cast<int>(of_rank));
                          most[lane] = larger_count(most[lane], of_rank, own + i * sharing);
                      });
    });
    if (sharing == 1) {
        warp.lanes(lanes, [&](int lane) { rows[lane] = part[lane]; });
        return;
    }
    int end = warp.exclusive_scan(sharing * lanes, part);
    for (int expert = lanes - 1; expert >= 0; --expert) {
        const int begin = warp.broadcast(part, expert * sharing);
        warp.lanes(lanes, [&](int lane) {
            if (lane == expert) rows[lane] = difference_of(end, begin);
        });
        end = begin;
    }
}

// Counts an expert's rows before that of a token: those of earlier ranks, then those of earlier
// tokens of its own rank.
template <class F>
struct RowsBefore {
    const Choices<F>& choices;
    int rank, token;
    int terms = rank + token / 32 + 1;

    // Sums every step-th term from `first` on.
    EP_FN int sum(int expert, int first, int step) const {
        int rows = 0;
        for_each_load(
            first < terms ? (terms - first + step - 1) / step : 0,
            [&](int i) { return term(expert, first + i * step); },
            [&](int, int of_term) { rows = sum_of(rows, of_term); });
        return rows;
    }

  private:
    EP_FN int term(int expert, int i) const {
        if (i < rank) return static_cast<int>(choices.word(i, expert, 0));
        uint32_t tokens = choices.word(rank, expert, 1 + i - rank);
        if (i == rank + token / 32) tokens &= (uint32_t{1} << token % 32) - 1;
        return popcount(tokens);
    }
};

// Counts in each lane the rows before that of its expert, if that is not negative. If all ranks are
// mapped they are few, and each lane counts alone; else all lanes count for each one in turn.
template <WarpLike W, class F>
EP_FN void count_rows_before(W& warp, const RowsBefore<F>& before, int lanes,
                             const PerLane<W, int>& expert, PerLane<W, int>& rows) {
    if constexpr (F::kMapsAll) {
        warp.lanes(lanes, [&](int lane) {
            if (expert[lane] >= 0) rows[lane] = before.sum(expert[lane], 0, 1);
        });
        return;
    }
    const uint32_t counted = warp.ballot(lanes, [&](int lane) { return expert[lane] >= 0; });
    for_each_lane(counted, [&](int one) {
        PerLane<W, int> part;
        const int own = warp.broadcast(expert, one);
        warp.lanes(32, [&](int lane) { part[lane] = before.sum(own, lane, 32); });
        const int all = warp.exclusive_scan(32, part);
        warp.lanes(lanes, [&](int lane) {
            if (lane == one) rows[lane] = all;
        });
    });
}

// Stores for the handle how many rows there are, and reports it to a host that waits, which then
// also sees all counts that this warp wrote before.
template <WarpLike W>
EP_FN void note_rows(W& warp, const LowLatencyDispatchArgs& args, int rows, bool overflows) {
    Layout::Totals* const host = args.report.totals;
    warp.lanes(1, [&](int) {
        args.layout.overflow() = overflows;
        args.layout.start(args.heap.local_experts()) = rows;
        if (host) host->expert_rows = rows;
    });
    if (host) warp.template publish<Scope::System>(&host->ticket, args.report.ticket);
}

// Whether this warp stores for the handle where rows begin: in small batches it is otherwise idle.
EP_FN bool notes_starts(const Team& team) { return team.warp == (team.warps - 1) / 2; }

// Computes where each expert's rows begin; every warp does, and one also stores it for the handle.
// read_rows(first, lanes, rows, most): for each lane the number of rows of an expert, and
// larger_count of the ranks' counts; false: it failed.
template <WarpLike W, class ReadRows>
EP_FN bool find_starts(W& warp, const LowLatencyDispatchArgs& args, const Team& team,
                       ReadRows&& read_rows) {
    const LowLatencyLayout& layout = args.layout;
    const int local_experts = args.heap.local_experts();
    int32_t* starts = layout.scratch(team.warp);
    PerLane<W, int> rows, start;
    PerLane<W, uint64_t> most;
    int64_t total = 0;
    bool overflows = false;
    const bool for_handle = notes_starts(team);
    const int bytes = args.format.weight_bytes;
    if ((args.expert_rows || args.is_flat) && !for_handle) return true;
    for (int first = 0; first < local_experts; first += 32) {
        const int lanes = lanes_from(first, local_experts);
        warp.lanes(32, [&](int lane) { most[lane] = 0; });
        if (!read_rows(first, lanes, rows, most)) return false;
        const uint32_t wrong = warp.ballot(32, [&](int lane) {
            return most[lane] >> 32 > static_cast<uint32_t>(args.heap.max_tokens);
        });
        if (wrong) {
            const uint64_t count = warp.broadcast(most, lowest_lane(wrong));
            warp.fail(Outcome::Mismatch, Wait::Choices,
                      WaitCondition{count >> 32, static_cast<uint64_t>(args.heap.max_tokens),
                                    static_cast<int>(static_cast<uint32_t>(count))});
            return false;
        }
        warp.lanes(lanes, [&](int lane) {
            start[lane] = static_cast<int>(align_up(rows[lane], args.expert_alignment));
        });
        const int sum = warp.exclusive_scan(lanes, start);
        warp.lanes(lanes, [&](int lane) {
            start[lane] = static_cast<int>(args.expert_rows ? args.expert_rows * (first + lane)
                                                            : total + start[lane]);
            starts[first + lane] = start[lane];
            if (!for_handle) return;
            layout.count(first + lane) = rows[lane];
            layout.start(first + lane) = start[lane];
            const int64_t filled =
                args.expert_rows
                    ? args.expert_rows
                    : static_cast<int64_t>(align_up(rows[lane], args.expert_alignment));
            args.set_expert_rows(first + lane, filled);
            if (!args.clears_weights || args.is_flat) return;
            for (int64_t row = rows[lane]; row < filled && start[lane] + row < args.max_rows; ++row)
                store_weight(args.recv_weights + (start[lane] + row) * bytes, 0, bytes);
        });
        total += sum;
        overflows |= warp.ballot(lanes, [&](int lane) {
            if (args.expert_rows && rows[lane] > args.expert_rows) return true;
            return rows[lane] > 0 && int64_t{start[lane]} + rows[lane] > args.max_rows;
        }) != 0;
    }
    if (!for_handle || args.is_flat) return true;
    if (args.expert_rows) total = args.expert_rows * local_experts;
    if (args.clears_weights && total < args.max_rows)
        warp.zero(args.recv_weights + total * bytes, (args.max_rows - total) * bytes);
    note_rows(warp, args, static_cast<int>(total), overflows);
    return true;
}

// Stores for the handle which tokens arrive.
template <WarpLike W, class F>
EP_FN void note_present(W& warp, const Choices<F>& choices) {
    const LowLatencyLayout& layout = choices.call.args.layout;
    const int words = choices.call.world() * choices.chunks;
    for (int first = 0; first < words; first += 32) {
        warp.lanes(lanes_from(first, words), [&](int lane) {
            const int word = first + lane;
            layout.present(word) = choices.present(word / choices.chunks, word % choices.chunks);
        });
    }
}

// Writes the scales of a piece of a row to its output rows: contiguous, or each word to its column.
template <WarpLike W>
EP_FN void write_scales(W& warp, const LowLatencyDispatchArgs& args, uint32_t placed,
                        const PerLane<W, int>& dst_row, const char* scales, const Piece& piece) {
    if (!args.scale_column) {
        const size_t bytes = args.format.scale_bytes;
        PerLane<W, void*> row{};
        warp.lanes(args.format.topk, [&](int lane) {
            if (placed >> lane & 1)
                row[lane] = args.recv_scales + dst_row[lane] * bytes + piece.first_scale;
        });
        warp.template multicast<CacheHint::EvictFirst>(row, placed, scales + piece.first_scale,
                                                       piece.scale_bytes);
        return;
    }
    const auto* words = reinterpret_cast<const uint32_t*>(scales);
    const int end = (piece.first_scale + piece.scale_bytes) / 4;
    PerLane<W, uint32_t*> columns;
    warp.lanes(args.format.topk, [&](int lane) {
        if (placed >> lane & 1)
            columns[lane] = reinterpret_cast<uint32_t*>(args.recv_scales) +
                            args.scale_word(static_cast<uint32_t>(dst_row[lane]));
    });
    for_each_lane(placed, [&](int lane) {
        uint32_t* column = warp.broadcast(columns, lane);
        for (int first = piece.first_scale / 4; first < end; first += 32) {
            warp.lanes(lanes_from(first, end), [&](int word) {
                column[(first + word) * args.scale_column] = words[first + word];
            });
        }
    });
}

// Stores for combine where a row went, and for the caller its weights: weight_of(lane).
template <WarpLike W, class WeightOf>
EP_FN void note_output_rows(W& warp, const LowLatencyDispatchArgs& args, int source, int token,
                            const PerLane<W, int>& dst_row, WeightOf&& weight_of) {
    const int weight_bytes = args.format.weight_bytes;
    int32_t* noted = args.layout.dst_rows(source, token);
    warp.lanes(args.format.topk, [&](int lane) {
        noted[lane] = dst_row[lane];
        if (dst_row[lane] < 0) return;
        const size_t row = dst_row[lane];
        store_weight(args.recv_weights + row * weight_bytes, weight_of(lane), weight_bytes);
    });
}

// Computes output rows, once find_starts has computed where each expert's rows begin.
struct RowPlaces {
    const LowLatencyDispatchArgs& args;
    int local_experts = args.heap.local_experts();
    int first_expert = args.rank * local_experts;
    const int32_t* starts;

    EP_FN RowPlaces(const LowLatencyDispatchArgs& of, const Team& team)
        : args(of), starts(of.layout.scratch(team.warp)) {}

    // -1: the expert is on another rank, or there is none.
    EP_FN int local_expert(int32_t expert) const {
        return is_within(expert, first_expert, local_experts) ? expert - first_expert : -1;
    }
    // The output row of an expert's row number `before`.
    EP_FN int row(int expert, int64_t before) const {
        const int64_t start = args.expert_rows ? args.expert_rows * expert : starts[expert];
        const bool fits = before >= 0 && start + before < args.max_rows &&
                          (!args.expert_rows || before < args.expert_rows);
        return fits ? static_cast<int>(start + before) : LowLatencyArgs::kOverflowed;
    }
};

// Receives a piece of a row and copies it to its row at each of the token's experts here.
template <WarpLike W, class F>
EP_FN bool receive_piece(W& warp, const Choices<F>& choices, const Team& team, int source,
                         int token, const Piece& piece) {
    const LowLatencyDispatch<F>& call = choices.call;
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    char* slot = written_by<char>(call.fabric, source, call.heap().row(call.bank, source, token));
    const RowPlaces places(args, team);
    PerLane<W, int> dst_row;
    PerLane<W, void*> row{};
    PerLane<W, int> expert, before;
    warp.lanes(format.topk, [&](int lane) {
        expert[lane] = places.local_expert(choices.experts(source, token)[lane]);
    });
    count_rows_before(warp, RowsBefore<F>{choices, source, token}, format.topk, expert, before);
    warp.lanes(format.topk, [&](int lane) {
        dst_row[lane] =
            expert[lane] < 0 ? LowLatencyArgs::kElsewhere : places.row(expert[lane], before[lane]);
        if (dst_row[lane] >= 0) {
            row[lane] = args.recv_x + static_cast<size_t>(dst_row[lane]) * format.payload_bytes +
                        piece.first;
        }
    });
    const uint32_t placed = warp.ballot(format.topk, [&](int lane) { return dst_row[lane] >= 0; });
    if (!F::kMapsAll && !call.masking()) {
        PerLane<W, int> rank;
        warp.lanes(1, [&](int lane) { rank[lane] = source; });
        if (!wait_rows_put(warp, call, 1, 1, rank)) return false;
    }
    PerLane<W, char*> slots;
    warp.lanes(piece.count, [&](int lane) { slots[lane] = slot + Piece::tag(lane); });
    const uint32_t tags = (uint32_t{1} << piece.count) - 1;
    const auto from = [&](int) { return source; };
    if (!wait_tags(warp, call, piece.count, tags, slots, piece.number, from)) return false;
    warp.template stage<CacheHint::Keep>(slot + format.payload() + piece.first, piece.bytes);
    if (!piece.number) {
        note_output_rows(warp, args, source, token, dst_row, [&](int lane) {
            return load_weight(slot + format.weights() + lane * format.weight_bytes,
                               format.weight_bytes);
        });
    }
    warp.template multicast<CacheHint::EvictFirst>(
        row, placed, slot + format.payload() + piece.first, piece.bytes);
    if (piece.scale_bytes) write_scales(warp, args, placed, dst_row, slot + format.scales(), piece);
    return true;
}

// Adds the number of tokens from each rank to the caller's recv_rows. Called by the last warp.
template <WarpLike W>
EP_FN void count_rows(W& warp, const LowLatencyDispatchArgs& args) {
    const int world = args.heap.topology.world(), chunks = args.heap.chunks();
    for (int first = 0; args.recv_rows && first < world; first += 32) {
        warp.lanes(lanes_from(first, world), [&](int lane) {
            for (int chunk = 0; chunk < chunks; ++chunk)
                args.recv_rows[first + lane] +=
                    popcount(args.layout.present((first + lane) * chunks + chunk));
        });
    }
}

// Zeros the rows of a token, and stores for combine that it has none.
template <WarpLike W>
EP_FN void omit_token(W& warp, const LowLatencyDispatchArgs& args, int source, int token) {
    const RowFormat& format = args.format;
    int32_t* noted = args.layout.dst_rows(source, token);
    PerLane<W, int> dst_row;
    warp.lanes(format.topk, [&](int lane) {
        dst_row[lane] = noted[lane];
        if (dst_row[lane] >= 0) noted[lane] = LowLatencyArgs::kOverflowed;
    });
    const uint32_t placed = warp.ballot(format.topk, [&](int lane) { return dst_row[lane] >= 0; });
    for_each_lane(placed, [&](int lane) {
        const size_t row = warp.broadcast(dst_row, lane);
        warp.zero(args.recv_x + row * format.payload_bytes, format.payload_bytes);
        warp.zero(args.recv_scales + row * format.scale_bytes, format.scale_bytes);
        warp.zero(args.recv_weights + row * format.weight_bytes, format.weight_bytes);
    });
}

// Omits the tokens that arrive after args.max_received others, in the order of (rank, token).
// Called by the last warp, because few calls have such tokens.
template <WarpLike W>
EP_FN void omit_tokens(W& warp, const LowLatencyDispatchArgs& args) {
    const LowLatencyLayout& layout = args.layout;
    const int chunks = args.heap.chunks(), words = args.heap.topology.world() * chunks;
    // Without a capacity, max_received is max_rows, and more tokens have more rows than that.
    if (!args.max_received || (!args.expert_rows && !layout.overflow())) return;
    int64_t left = args.max_received;
    PerLane<W, uint32_t> bits;
    PerLane<W, int> before;
    for (int first = 0; first < words; first += 32) {
        const int lanes = lanes_from(first, words);
        warp.lanes(lanes, [&](int lane) {
            bits[lane] = layout.present(first + lane);
            before[lane] = popcount(bits[lane]);
        });
        const int arrive = warp.exclusive_scan(lanes, before);
        const uint32_t beyond = warp.ballot(
            lanes, [&](int lane) { return before[lane] + popcount(bits[lane]) > left; });
        for_each_lane(beyond, [&](int lane) {
            const int word = first + lane;
            uint32_t rest = warp.broadcast(bits, lane);
            for (int64_t kept = left - warp.broadcast(before, lane); kept > 0; --kept)
                rest &= rest - 1;
            for (; rest; rest &= rest - 1)
                omit_token(warp, args, word / chunks, word % chunks * 32 + lowest_lane(rest));
        });
        if (beyond) warp.lanes(1, [&](int) { layout.overflow() = 1; });
        left -= arrive;
    }
}

// Receives a warp's share, without lines.
template <WarpLike W, class F>
EP_FN bool receive_by_slots(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const LowLatencyDispatchArgs& args = call.args;
    if (!may_receive(warp, call, team)) return false;
    if (call.masking() && team.warp == 0) note_active(warp, call);
    const Choices<F> choices{call};
    const bool started =
        find_starts(warp, args, team, [&](int first, int lanes, auto& rows, auto& most) {
            count_rows_of(warp, choices, first, lanes, rows, most);
            return true;
        });
    if (!started) return false;
    if (notes_starts(team)) note_present(warp, choices);
    // Start with this rank's own rows, which are there first.
    return for_own_shares<Pieces>(
        warp, args, team, args.rank,
        [&](int lanes, const auto& rank, const auto& first, auto& bits) {
            warp.lanes(lanes, [&](int lane) {
                bits[lane] = choices.present(rank[lane], first[lane] / 32);
            });
            return true;
        },
        [&](int source, int token, const Piece& piece) {
            return receive_piece(warp, choices, team, source, token, piece);
        });
}

}  // namespace ep
