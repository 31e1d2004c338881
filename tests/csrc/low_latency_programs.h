#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "exec/host/host_warp.h"
#include "fabric/host_fabric.h"
#include "program_ranks.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"

namespace ep {

// Random programs of low-latency calls: all ranks send the same calls in the same order, and each
// rank receives them where it likes, at the latest before it sends the second one after of its
// kind. Launches of a rank follow each other, as on a stream; those of different ranks do not.
//
// A program runs several times over the same arguments, as a captured graph does. Numbers are
// small integers, so sums are exact: a combine of rows as they came gives each token times its
// choices.
//
// Some programs are of dispatches alone, whose rows become fp8 on the way.
//
// With masking every receiving half is checked when it ends: what it took of a rank is all or
// nothing, and nothing for ever once it was nothing.
struct LowLatencyProgram : ProgramRanks {
    // A launch: of one half or of both.
    struct Half {
        int call;
        bool sends, receives;
    };
    struct Call {
        bool is_combine;
        int dispatch;  // combine: the call whose rows it brings back
        bool sum_at_expert;
    };
    // One rank's part of a call.
    struct Part {
        Tensor<int32_t> ids, layout, experts;
        Tensor<float> x, weights, rows, row_weights, y, y_values;
        Tensor<BFloat16> bf16_x;
        Tensor<uint32_t> scales;
        std::vector<int64_t> recv_rows, recv_wait_ns, tokens_per_expert;
        Layout::Totals reported{};
        uint64_t number = 0;
        LowLatencyDispatchArgs dispatch{};
        LowLatencyCombineArgs combine{};
    };

    int experts, topk, hidden, max_tokens, warps, under_way;
    bool fp8;
    LowLatencyHeap heap;
    std::vector<Call> calls;
    std::vector<std::vector<Half>> halves;  // of each rank
    std::vector<std::vector<Part>> parts;   // [rank][call]
    std::vector<ControlBlock> controls;
    std::vector<HostFabric> fabrics;
    // with masking
    std::vector<std::vector<int32_t>> active;  // [rank][rank], the callers'
    std::vector<std::vector<int>>
        left_out_at;  // [rank][half]: the ranks that the caller masks before it
    std::vector<std::vector<bool>> gone, masked;  // [rank][rank]: as seen, and by the caller
    std::vector<std::vector<MaskedRank>> shown;
    std::vector<std::array<uint64_t, 2>> dropped;
    std::atomic<int> wrong = 0;
    std::vector<uint64_t> launches;  // that a rank has done

    // OfWarps: few warps and short rows. OfBlocks: whole blocks of warps, and rows for the copy
    // engine, too.
    enum class Sizes { OfWarps, OfBlocks };

    // max_under_way: how many calls of a kind may be; more than two is against the rules. lines:
    // whether rows are lines.
    LowLatencyProgram(uint64_t seed, SimulatedNetwork* network, int max_under_way = 2,
                      Sizes sizes = Sizes::OfWarps, bool masking = false, bool lines = false,
                      Topology most = {3, 2})
        : under_way(max_under_way) {
        random.seed(seed);
        topology = {pick(1, most.nodes), pick(1, most.ranks_per_node)};
        if (lines) topology = {1, topology.world()};  // all mapped
        const int world = topology.world();
        experts = world * pick(1, 3);
        topk = pick(1, std::min(3, experts));
        hidden = pick(1, 5);
        max_tokens = pick(1, 40) > 34 ? 35 : pick(1, 4);
        warps = pick(1, 3);
        if (sizes == Sizes::OfBlocks) {
            warps = 16 * pick(1, 2);
            hidden = std::array{3, 40, 400, 2000}[pick(0, 3)];
            if (pick(0, 5) == 0) experts = 40 * world;  // more than there are lanes
        }
        fp8 = seed % 3 == 2;
        if (fp8) hidden *= 4;  // a float has as many bytes
        const RowFormat format = fp8 ? RowFormat{hidden, 4 * scale_blocks(hidden), 4, topk, 4}
                                     : RowFormat{hidden * 4, 0, 4, topk, 2};
        const int channels = sizes == Sizes::OfBlocks ? warps / 16 : pick(1, warps);
        const bool sums_at_expert = seed % 4 > 1 && !masking;  // with lines and without
        heap = {topology,           experts,  max_tokens, topk,  format.slot_bytes(),
                topology.nodes > 1, channels, masking,    lines, sums_at_expert};
        active.assign(world, std::vector<int32_t>(world, 1));
        gone.assign(world, std::vector<bool>(world));
        masked = gone;
        shown.assign(world, std::vector<MaskedRank>(world));
        dropped.resize(world);
        controls.resize(world);
        make_ranks(heap.bytes(), [&](int rank) { return &controls[rank]; });
        for (int rank = 0; rank < world; ++rank)
            fabrics.emplace_back(topology, rank, heaps, network);
        make_calls(pick(3, 10));
        make_halves();
        make_parts(format);
        left_out_at.resize(world);
        const bool masks_some = masking && world > 1 && pick(0, 2) == 0;
        for (int rank = 0; rank < world; ++rank) {
            for (size_t half = 0; half < halves[rank].size(); ++half) {
                const bool now = masks_some && pick(0, 20) == 0;
                left_out_at[rank].push_back(now ? (rank + pick(1, world - 1)) % world : -1);
            }
        }
    }

    void make_calls(int count) {
        for (int call = 0; call < count; ++call) {
            std::vector<int> dispatches;
            for (int other = 0; other < call; ++other) {
                if (!calls[other].is_combine) dispatches.push_back(other);
            }
            const bool combine = !dispatches.empty() && pick(0, 1) && !fp8;
            const int dispatch = combine ? dispatches[pick(0, dispatches.size() - 1)] : 0;
            const bool at_expert = pick(0, 1) == 1 || heap.sums_at_expert;
            calls.push_back({combine, dispatch, at_expert || is_flat(dispatch)});
        }
    }

    void make_halves() {
        halves.resize(topology.world());
        for (std::vector<Half>& own : halves) {
            std::vector<int> waiting[2];  // for their receiving half, by kind
            auto receive = [&](bool kind, size_t i) {
                own.push_back({waiting[kind][i], false, true});
                waiting[kind].erase(waiting[kind].begin() + i);
            };
            int sent[2] = {0, 0};
            std::vector<int> number(calls.size());
            for (int call = 0; call < static_cast<int>(calls.size()); ++call) {
                const bool kind = calls[call].is_combine;
                number[call] = sent[kind]++;
                // a combine needs its rows
                for (size_t i = 0; kind && i < waiting[0].size(); ++i) {
                    if (waiting[0][i] == calls[call].dispatch) receive(false, i--);
                }
                for (size_t i = 0; i < waiting[kind].size(); ++i) {
                    if (number[waiting[kind][i]] + under_way <= number[call]) receive(kind, i--);
                }
                const bool at_once = pick(0, 2) == 0;
                own.push_back({call, true, at_once});
                if (!at_once) waiting[kind].push_back(call);
                for (const bool any : {false, true}) {
                    while (!waiting[any].empty() && pick(0, 2) == 0)
                        receive(any, pick(0, waiting[any].size() - 1));
                }
            }
            for (const bool any : {false, true}) {
                while (!waiting[any].empty()) receive(any, pick(0, waiting[any].size() - 1));
            }
        }
    }

    void make_parts(const RowFormat& format) {
        parts.resize(topology.world());
        for (int rank = 0; rank < topology.world(); ++rank) {
            parts[rank].resize(calls.size());
            for (size_t c = 0; c < calls.size(); ++c) {
                Part& part = parts[rank][c];
                const Call& call = calls[c];
                Part& rows = call.is_combine ? parts[rank][call.dispatch] : part;
                if (!call.is_combine) make_dispatch(part, rank, is_flat(c) ? topk : 1);
                const int tokens = static_cast<int>(rows.ids.size()) / topk;
                const LowLatencyLayout layout{heap, topk, warps, rows.layout.data()};
                part.recv_rows.resize(topology.world());
                part.recv_wait_ns.resize(topology.world());
                const LowLatencyArgs args{rank,
                                          heap,
                                          layout,
                                          format,
                                          tokens,
                                          &part.number,
                                          max_rows(call.is_combine ? call.dispatch : c),
                                          c % 2 ? part.recv_wait_ns.data() : nullptr,
                                          {active[rank].data(), shown[rank].data(),
                                           dropped[rank].data(), nullptr, 60'000'000'000, 4, 1000},
                                          nullptr,
                                          0,
                                          is_flat(call.is_combine ? call.dispatch : c)};
                auto bytes = [](Tensor<float>& values) {
                    return reinterpret_cast<char*>(values.data());
                };
                if (!call.is_combine) {
                    part.dispatch = {args,
                                     part.ids.data(),
                                     4,
                                     1,
                                     0,
                                     bytes(part.x),
                                     nullptr,
                                     bytes(part.weights),
                                     bytes(part.rows),
                                     reinterpret_cast<char*>(part.scales.data()),
                                     bytes(part.row_weights)};
                    part.dispatch.recv_rows = part.recv_rows.data();
                    part.dispatch.tokens_per_expert = part.tokens_per_expert.data();
                    part.dispatch.clears_weights = c % 2;
                    part.dispatch.report = {&part.reported, c + 1};
                    if (is_flat(c)) {
                        part.dispatch.recv_experts = part.experts.data();
                    } else {
                        part.dispatch.max_received = limit_of(c);
                    }
                    if (!fp8) continue;
                    part.dispatch.x = reinterpret_cast<char*>(part.bf16_x.data());
                    part.dispatch.quantize = format_of(c);
                    part.dispatch.scale_column = c % 2 ? args.max_rows : 0;
                    continue;
                }
                part.y.resize(static_cast<size_t>(tokens) * hidden);
                part.y_values.resize(static_cast<size_t>(tokens) * topk);
                part.combine = {args,
                                bytes(rows.rows),
                                bytes(rows.row_weights),
                                bytes(part.y),
                                bytes(part.y_values),
                                call.sum_at_expert,
                                nullptr,
                                nullptr,
                                false};
                if (c % 2) part.combine.layout_call = &rows.number;
            }
        }
    }

    // columns: weights of a row that arrives.
    void make_dispatch(Part& part, int rank, int columns) {
        const int tokens = pick(0, 2) ? pick(0, max_tokens) : 0;
        for (int token = 0; token < tokens; ++token) {
            const int first = pick(0, experts - 1);
            for (int k = 0; k < topk; ++k)
                part.ids.push_back(pick(0, 5) ? (first + k) % experts : -1);
            for (int i = 0; i < hidden; ++i) {
                part.x.push_back(rank * 50 + token + 7 * i);
                part.bf16_x.push_back(
                    {static_cast<uint16_t>(std::bit_cast<uint32_t>(part.x.back()) >> 16)});
            }
        }
        for (size_t i = 0; i < part.ids.size(); ++i) part.weights.push_back(1 + rank + 3 * i);
        const LowLatencyLayout layout{heap, topk, warps, nullptr};
        part.layout.resize(layout.size());
        const size_t rows = all_rows();
        part.rows.resize(rows * hidden);
        part.row_weights.assign(rows * columns, -1);
        part.experts.assign(rows * columns, -2);
        part.tokens_per_expert.resize(2 * heap.local_experts());
        if (fp8) part.scales.resize(rows * scale_blocks(hidden));
    }

    // Of some dispatches: the rows that a rank has room for, and the tokens that keep theirs.
    int64_t limit_of(size_t call) const {
        return call % 4 == 1 && !fp8 && !heap.masking ? 1 + (call + hidden) % max_tokens : 0;
    }
    int64_t max_rows(size_t call) const {
        const int64_t limit = limit_of(call);
        return limit ? limit : all_rows();
    }
    int64_t all_rows() const {
        return int64_t{topology.world()} * max_tokens * heap.choices_per_rank();
    }
    // Whether a dispatch has flat rows.
    bool is_flat(size_t call) const { return heap.lines && !fp8 && call % 3 == 1; }

    static ScaleFormat format_of(size_t call) {
        return call % 3 ? ScaleFormat::PowerOf2 : ScaleFormat::Fp32;
    }

    // The roles of all ranks. Each warp goes through its rank's halves, and waits after each for
    // the others: a launch follows the one before.
    template <class Warp>
    std::vector<RoleTask> tasks(int replays, std::vector<uint64_t>& finished) {
        return tasks<Warp>(replays, finished, fabrics);
    }
    template <class Warp, class AnyFabric>
    std::vector<RoleTask> tasks(int replays, std::vector<uint64_t>& finished,
                                std::vector<AnyFabric>& ways) {
        finished.assign(topology.world(), 0);
        launches.assign(topology.world(), 0);
        std::vector<RoleTask> all;
        for (int rank = 0; rank < topology.world(); ++rank) {
            for (int number = 0; number < warps; ++number) {
                all.push_back({&states[rank], [=, this, &finished, &ways](Executor& executor) {
                                   Warp warp(executor, states[rank], Role::Launch, number);
                                   run_rank(warp, executor, ways[rank], rank, number, replays,
                                            finished[rank]);
                               }});
            }
        }
        return all;
    }

    template <class Warp, class AnyFabric>
    void run_rank(Warp& warp, Executor& executor, AnyFabric& fabric, int rank, int number,
                  int replays, uint64_t& finished) {
        std::atomic_ref<uint64_t> shares(finished), ended(launches[rank]);
        uint64_t launch = 0;
        for (int replay = 0; replay < replays; ++replay) {
            for (size_t half = 0; half < halves[rank].size(); ++half) {
                run_half(warp, fabric, rank, halves[rank][half], Team{number, warps});
                if (states[rank].aborted() || std::atomic_ref(states[rank].unfinished).load())
                    return;
                ++launch;
                if (shares.fetch_add(1) + 1 == launch * warps) {
                    end_launch(rank, half);
                    ended.store(launch);
                }
                auto over = [&] { return ended.load() >= launch; };
                WaitEnd end = over() ? WaitEnd::Met : WaitEnd::Expired;
                while (end == WaitEnd::Expired) {
                    end = executor.wait(Condition(over), states[rank]);
                    if (end == WaitEnd::Expired && !heap.masking)
                        states[rank].abort(Outcome::Timeout);
                }
                if (end != WaitEnd::Met) return;
            }
        }
    }

    template <class Warp, class AnyFabric>
    void run_half(Warp& warp, AnyFabric& fabric, int rank, const Half& half, const Team& team) {
        const auto with_launches = [&]<LowLatencyLaunches kLaunches>(const auto& args,
                                                                     auto&& body) {
            const auto call = half.sends ? next_call(fabric, args) : begun_call(fabric, args);
            args.by_lines() ? body.template operator()<kLaunches, true>(call)
                            : body.template operator()<kLaunches, false>(call);
        };
        const auto with_call = [&](const auto& args, auto&& body) {
            using enum LowLatencyLaunches;
            if (!half.sends) return with_launches.template operator()<Receive>(args, body);
            if (!half.receives) return with_launches.template operator()<Send>(args, body);
            with_launches.template operator()<Both>(args, body);
        };
        const Part& part = parts[rank][half.call];
        if (calls[half.call].is_combine) {
            return with_call(part.combine,
                             [&]<LowLatencyLaunches kLaunches, bool kLines>(const auto& call) {
                                 low_latency_combine<kLaunches, float, kLines>(warp, call, team);
                             });
        }
        with_call(part.dispatch, [&]<LowLatencyLaunches kLaunches, bool kLines>(const auto& call) {
            with_row_kind(call.args.row_kind(), [&]<RowKind kRows>() {
                low_latency_dispatch<kLaunches, kRows, kLines>(warp, call, team);
            });
        });
    }

    // By one warp, between two launches.
    void end_launch(int rank, size_t half) {
        if (!heap.masking) return;
        const auto [call, sends, receives] = halves[rank][half];
        if (receives) wrong += calls[call].is_combine ? take_back(rank, call) : take(rank, call);
        // writing 1 brings nobody back
        if (half % 4 == 3) std::fill(active[rank].begin(), active[rank].end(), 1);
        const size_t next = (half + 1) % halves[rank].size();
        if (const int other = left_out_at[rank][next]; other >= 0) {
            active[rank][other] = 0;
            masked[rank][other] = true;
        }
    }

    // What a rank has seen of another in a call: whether that is wrong.
    bool see(int rank, int other, bool takes_part) {
        if (gone[rank][other] && takes_part) return true;
        gone[rank][other] = !takes_part;
        return !takes_part && (rank == other || active[rank][other]);
    }

    int take(int rank, int call) {
        int errors = 0;
        for (int other = 0; other < topology.world(); ++other)
            errors += see(rank, other, parts[rank][call].dispatch.layout.active(other));
        return errors + dispatch_errors(rank, call);
    }

    int take_back(int rank, int call) {
        const Part& own = parts[rank][call];
        const Part& sent = parts[rank][calls[call].dispatch];
        int errors = 0;
        for (int other = 0; other < topology.world(); ++other) {
            int choices = 0, kept = 0;
            for (size_t i = 0; i < sent.ids.size(); ++i) {
                if (sent.ids[i] < 0 || sent.ids[i] / heap.local_experts() != other) continue;
                ++choices;
                kept += own.y_values[i] != 0;
            }
            if (!choices) continue;
            errors += kept && kept < choices;
            errors += kept && !sent.dispatch.layout.active(other);
            errors += see(rank, other, kept);
        }
        return errors + combine_errors(rank, call);
    }

    // Wrong values of all outputs.
    int errors() const {
        int wrong = 0;
        for (int rank = 0; rank < topology.world(); ++rank) {
            for (size_t c = 0; c < calls.size(); ++c) wrong += errors_of(rank, c);
        }
        return wrong;
    }

    // The same, of the calls that each rank has received; finished: by how many of its tasks'
    // halves, in the first replay.
    int errors(const std::vector<uint64_t>& finished) const {
        int wrong = 0;
        for (int rank = 0; rank < topology.world(); ++rank) {
            for (size_t half = 0; half < finished[rank] / warps && half < halves[rank].size();
                 ++half) {
                if (halves[rank][half].receives) wrong += errors_of(rank, halves[rank][half].call);
            }
        }
        return wrong;
    }

    int errors_of(int rank, size_t c) const {
        return calls[c].is_combine ? combine_errors(rank, c) : dispatch_errors(rank, c);
    }

    bool is_at(int rank, int32_t expert) const {
        return expert >= 0 && expert / heap.local_experts() == rank;
    }

    // A row of a dispatch: which choice of its source it is for, or, if it is flat, the first one
    // of its token; and whether there is room for it.
    struct Row {
        int source;
        size_t choice;
        bool is_kept;
    };

    // Those of a rank, of the sources that take part, in order.
    std::vector<Row> rows_at(int rank, size_t c) const {
        const size_t room = max_rows(c);
        std::vector<Row> arriving, rows;  // arriving: of each token one
        std::vector<std::vector<Row>> of_expert(heap.local_experts());
        for (int source = 0; source < topology.world(); ++source) {
            if (heap.masking && !parts[rank][c].dispatch.layout.active(source)) continue;
            const Tensor<int32_t>& ids = parts[source][c].ids;
            for (size_t i = 0; i < ids.size(); ++i) {
                if (!is_at(rank, ids[i])) continue;
                const size_t first = i / topk * topk;
                const bool is_new = arriving.empty() || arriving.back().source != source ||
                                    arriving.back().choice != first;
                if (is_new) arriving.push_back({source, first, arriving.size() < room});
                const int expert = ids[i] % heap.local_experts();
                of_expert[expert].push_back({source, i, arriving.back().is_kept});
            }
        }
        if (is_flat(c)) return arriving;
        for (const std::vector<Row>& own : of_expert) {
            for (Row row : own) {
                row.is_kept &= rows.size() < room;
                rows.push_back(row);
            }
        }
        return rows;
    }

    int dispatch_errors(int rank, size_t c) const {
        const Part& own = parts[rank][c];
        const int local_experts = heap.local_experts();
        const bool flat = is_flat(c);
        const size_t room = max_rows(c), columns = flat ? topk : 1;
        const std::vector<Row> rows = rows_at(rank, c);
        int wrong = 0;
        for (size_t row = 0; row < rows.size(); ++row) {
            const auto [source, choice, is_kept] = rows[row];
            const Part& from = parts[source][c];
            for (size_t k = 0; k < columns; ++k) {
                const int32_t id = from.ids[choice + k];
                const float weight = is_at(rank, id) ? from.weights[choice + k] : 0;
                const float none = row < room ? 0 : -1;
                wrong += own.row_weights[row * columns + k] != (is_kept ? weight : none);
                if (flat && is_kept)
                    wrong += own.experts[row * columns + k] !=
                             (is_at(rank, id) ? id % local_experts : -1);
            }
            const float* x = &own.rows[row * hidden];
            const size_t token = choice / topk;
            if (is_kept && fp8)
                wrong += fp8_row_differs(own, row, from, token, format_of(c));
            else if (is_kept)
                wrong += !std::equal(x, x + hidden, &from.x[token * hidden]);
            else if (!flat && row < room)
                wrong += std::count(x, x + hidden, 0) != hidden;
        }
        const bool is_marked = c % 2;
        for (size_t end = rows.size() * columns; end < room * columns; ++end) {
            if (flat || is_marked) wrong += own.row_weights[end] != (is_marked ? 0 : -1);
            if (flat) wrong += own.experts[end] != (is_marked ? -1 : -2);
        }
        std::vector<int64_t> counts(local_experts);
        for (int source = 0; source < topology.world(); ++source) {
            const Tensor<int32_t>& ids = parts[source][c].ids;
            const bool is_active = !heap.masking || own.dispatch.layout.active(source);
            std::set<size_t> tokens;
            for (size_t i = 0; i < ids.size(); ++i) {
                if (!is_at(rank, ids[i])) continue;
                counts[ids[i] % local_experts] += is_active;
                tokens.insert(i / topk);
            }
            const auto sent = static_cast<int64_t>(tokens.size());
            const int64_t counted = own.recv_rows[source];  // over all replays so far
            const int64_t least = sent && !heap.masking;
            wrong += sent ? counted < least || counted % sent : counted;
            wrong += own.recv_wait_ns[source] < 0 || (source == rank && own.recv_wait_ns[source]);
        }
        for (int i = 0; i < 2 * local_experts; ++i)
            wrong += own.tokens_per_expert[i] != counts[i % local_experts];
        if (flat) wrong += own.dispatch.layout.overflow() != (rows.size() > room);
        // for combine, and for a host that waits for it
        return wrong + std::cmp_not_equal(own.dispatch.layout.start(local_experts), rows.size()) +
               std::cmp_not_equal(own.reported.expert_rows, rows.size()) +
               (own.reported.ticket != c + 1);
    }

    bool fp8_row_differs(const Part& own, size_t row, const Part& from, size_t token,
                         ScaleFormat format) const {
        const size_t blocks = scale_blocks(hidden), column = own.dispatch.scale_column;
        std::vector<uint8_t> values(hidden);
        std::vector<uint32_t> scales(blocks);
        quantize_row(values.data(), reinterpret_cast<char*>(scales.data()),
                     &from.bf16_x[token * hidden], hidden, format);
        for (size_t block = 0; block < blocks; ++block) {
            const size_t at = column ? block * column + row : row * blocks + block;
            if (own.scales[at] != scales[block]) return true;
        }
        return std::memcmp(own.dispatch.recv_x + row * hidden, values.data(), hidden) != 0;
    }

    int combine_errors(int rank, size_t c) const {
        const size_t dispatch = calls[c].dispatch;
        const Part& own = parts[rank][c];
        const Part& sent = parts[rank][dispatch];
        std::vector<bool> is_kept(sent.ids.size(), !limit_of(dispatch));
        for (int other = 0; limit_of(dispatch) && other < topology.world(); ++other) {
            for (const Row& row : rows_at(other, dispatch)) {
                for (int k = 0; row.source == rank && k < (is_flat(dispatch) ? topk : 1); ++k) {
                    if (is_at(other, sent.ids[row.choice + k]))
                        is_kept[row.choice + k] = row.is_kept;
                }
            }
        }
        int wrong = 0;
        for (size_t token = 0; token < sent.ids.size() / topk; ++token) {
            int choices = 0;
            std::set<int> ranks;
            for (size_t i = token * topk; i < (token + 1) * topk; ++i) {
                bool chose = sent.ids[i] >= 0 && is_kept[i];
                if (heap.masking) chose &= own.y_values[i] != 0;
                const int choice = is_flat(dispatch) ? sent.ids[i] / heap.local_experts() : i;
                choices += chose && ranks.insert(choice).second;
                wrong += own.y_values[i] != (chose ? sent.weights[i] : 0);
            }
            for (int i = 0; i < hidden; ++i)
                wrong += own.y[token * hidden + i] != choices * sent.x[token * hidden + i];
        }
        return wrong;
    }
};

}  // namespace ep
