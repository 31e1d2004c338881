#pragma once

#include "protocol/low_latency_dispatch_send.h"
#include "protocol/low_latency_words.h"

namespace ep {

// The sending half of a low-latency dispatch whose rows are lines. Choices go first, as words, sent
// by separate warps while there are enough; then the rows. No warp waits for its stores to arrive.

// A word of bits for each of a few chunks of 32 tokens, one lane per token.
constexpr int kChunksAtOnce = 4;
struct ChunkBits {
    uint32_t of[kChunksAtOnce];
};

// Collects bits_of(expert) of all choices of each token, for kChunksAtOnce chunks from `first` on.
// kChoices: choices of a token whose loads are in flight at once. Loads are not predicated: for a
// choice that does not exist another one of the token is read, which changes nothing, and for a
// token that does not exist the last one, whose bits are dropped.
template <int kChoices, WarpLike W, class BitsOf>
EP_FN void read_chunks(W& warp, const LowLatencyDispatchArgs& args, int first,
                       PerLane<W, ChunkBits>& chunks, BitsOf&& bits_of) {
    const int tokens = args.num_tokens, topk = args.format.topk;
    const uint32_t bytes = args.index_bytes;
    const char* ids = static_cast<const char*>(args.topk_idx);
    warp.lanes(32, [&](int lane) {
        const int own = 32 * first + lane;
        uint32_t at[kChunksAtOnce];  // the token's choices, in bytes
        for (int chunk = 0; chunk < kChunksAtOnce; ++chunk) {
            const int token = own + 32 * chunk < tokens ? own + 32 * chunk : tokens - 1;
            at[chunk] = token * topk * bytes;
            chunks[lane].of[chunk] = 0;
        }
        for (int k = 0; k < topk; k += kChoices) {
            int32_t experts[kChoices][kChunksAtOnce];
            for (int i = 0; i < kChoices; ++i) {
                const uint32_t choice = (k + i < topk ? k + i : topk - 1) * bytes;
                for (int chunk = 0; chunk < kChunksAtOnce; ++chunk)
                    experts[i][chunk] =
                        *reinterpret_cast<const int32_t*>(ids + (at[chunk] + choice));
            }
            for (int i = 0; i < kChoices; ++i) {
                for (int chunk = 0; chunk < kChunksAtOnce; ++chunk)
                    chunks[lane].of[chunk] |= bits_of(experts[i][chunk]);
            }
        }
        for (int chunk = 0; chunk < kChunksAtOnce; ++chunk) {
            if (own + 32 * chunk >= tokens) chunks[lane].of[chunk] = 0;
        }
    });
}

// Sends a rank which tokens chose each of 32 of its experts from `first` on, and how many did.
template <int kChoices, WarpLike W, class F>
EP_FN void send_tokens_of_experts(W& warp, const LowLatencyDispatch<F>& call, int first,
                                  int first_here, uint64_t* words) {
    const LowLatencyDispatchArgs& args = call.args;
    const ChoiceWords numbers = args.heap.words();
    const int count = lanes_from(first_here, args.heap.local_experts());
    PerLane<W, ChunkBits> chosen;
    PerLane<W, uint32_t> tokens;
    PerLane<W, int> rows;
    warp.lanes(32, [&](int lane) { rows[lane] = 0; });
    for (int chunk = 0; 32 * chunk < args.num_tokens; chunk += kChunksAtOnce) {
        read_chunks<kChoices>(warp, args, chunk, chosen, [&](int32_t expert) {
            return is_within(expert, first, count) ? uint32_t{1} << (expert - first) : 0;
        });
        for (int i = 0; i < kChunksAtOnce; ++i) {
            if (32 * (chunk + i) >= args.num_tokens) break;
            warp.lanes(32, [&](int lane) { tokens[lane] = chosen[lane].of[i]; });
            warp.transpose(tokens);  // from one lane per token to one lane per expert
            uint64_t* own = words + numbers.tokens(first_here, chunk + i);
            warp.lanes(count, [&](int lane) {
                W::store_word(own + lane, word_with(call, tokens[lane]));
                rows[lane] += popcount(tokens[lane]);
            });
        }
    }
    warp.lanes(count, [&](int lane) {
        W::store_word(words + numbers.rows(first_here + lane), word_with(call, rows[lane]));
    });
}

// Sends a rank which tokens chose any of its experts.
template <int kChoices, WarpLike W, class F>
EP_FN void send_present(W& warp, const LowLatencyDispatch<F>& call, int rank, uint64_t* words) {
    const LowLatencyDispatchArgs& args = call.args;
    const int local_experts = args.heap.local_experts(), chunks = args.heap.chunks();
    PerLane<W, ChunkBits> is_here;
    PerLane<W, uint32_t> present;  // one lane per chunk
    warp.lanes(chunks, [&](int lane) { present[lane] = 0; });
    for (int chunk = 0; 32 * chunk < args.num_tokens; chunk += kChunksAtOnce) {
        read_chunks<kChoices>(warp, args, chunk, is_here, [&](int32_t expert) {
            return static_cast<uint32_t>(is_within(expert, rank * local_experts, local_experts));
        });
        for (int i = 0; i < kChunksAtOnce; ++i) {
            const uint32_t any =
                warp.ballot(32, [&](int lane) { return is_here[lane].of[i] != 0; });
            warp.lanes(chunks, [&](int lane) {
                if (lane == chunk + i) present[lane] = any;
            });
        }
    }
    warp.lanes(chunks, [&](int lane) {
        W::store_word(words + args.heap.words().present(lane), word_with(call, present[lane]));
    });
}

// Sends a rank kChoicesAtOnce choices from `first` on (fewer at the end), with their weights.
constexpr int kChoicesAtOnce = 8 * 32;
template <WarpLike W, class F>
EP_FN void send_choices_as_they_are(W& warp, const LowLatencyDispatch<F>& call, int first,
                                    uint64_t* words) {
    const LowLatencyDispatchArgs& args = call.args;
    const ChoiceWords numbers = args.heap.words();
    const int all = args.num_tokens * args.format.topk;
    const uint32_t index_bytes = args.index_bytes, weight_bytes = args.format.weight_bytes;
    const char* ids = static_cast<const char*>(args.topk_idx);
    uint64_t *experts = words + numbers.expert(0), *weights = words + numbers.weight(0, 0);
    warp.lanes(32, [&](int lane) {
        const int count = (lanes_from(first, all, kChoicesAtOnce) - lane + 31) / 32;
        auto choice = [&](int i) { return static_cast<uint32_t>(first + lane + 32 * i); };
        auto send = [&](uint64_t* word, uint64_t value) {
            W::store_word(word, word_with(call, static_cast<uint32_t>(value)));
        };
        for_each_load(
            count,
            [&](int i) { return *reinterpret_cast<const int32_t*>(ids + choice(i) * index_bytes); },
            [&](int i, int32_t expert) { send(experts + choice(i), expert); });
        if (!weight_bytes) return;
        for_each_load(
            count,
            [&](int i) {
                return load_weight(args.weights + choice(i) * weight_bytes, weight_bytes);
            },
            [&](int i, uint64_t weight) {
                uint64_t* halves = weights + ChoiceWords::kHalves * choice(i);
                send(halves, weight);
                if (weight_bytes == 8) send(halves + 1, weight >> 32);
            });
    });
}

// Sends a warp's share of all words, dealt from the middle warp on.
template <int kChoices, WarpLike W, class F>
EP_FN void send_all_words(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const LowLatencyDispatchArgs& args = call.args;
    const int groups = args.heap.words().groups(), choices = args.num_tokens * args.format.topk;
    const int parts = groups + 1 + (choices + kChoicesAtOnce - 1) / kChoicesAtOnce;
    const int first = team.warps - team.warps / 2;
    for (int i = (team.warp + first) % team.warps; i < call.world() * parts; i += team.warps) {
        const int rank = i / parts, part = i % parts;
        uint64_t* words = choice_words(call, rank, args.rank);
        if (part < groups) {
            const int expert = rank * args.heap.local_experts() + 32 * part;
            send_tokens_of_experts<kChoices>(warp, call, expert, 32 * part, words);
        } else if (part == groups) {
            send_present<kChoices>(warp, call, rank, words);
        } else {
            send_choices_as_they_are(warp, call, (part - groups - 1) * kChoicesAtOnce, words);
        }
    }
}

// Sends some lines of a token's row to every rank that needs it.
template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_lines_of(W& warp, const LowLatencyDispatch<F>& call, int token,
                         const Lines& lines) {
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    Choice<W> choice;
    PerLane<W, int> rank;
    PerLane<W, char*> slot;
    if (!find_ranks(warp, args, token, lines.first == 0, choice, rank)) return false;
    const size_t target = args.heap.row(call.bank, args.rank, token);
    warp.lanes(format.topk, [&](int lane) {
        if (rank[lane] >= 0) slot[lane] = call.fabric.template at<char>(rank[lane], target);
    });
    const uint32_t ranks = warp.first_of(format.topk, rank);
    const size_t row = token;
    const char* x = args.x + bytes_of_x<kQuantize>(row * format.payload_bytes);
    if constexpr (kQuantize) {
        warp.quantize_lines(slot, ranks, x, format.payload_bytes, lines, call.tag, args.quantize);
    } else {
        warp.send_lines(slot, ranks, x, format.payload_bytes, lines, call.tag,
                        args.scales + row * format.scale_bytes, ScalePlan::side_by_side(format));
    }
    return true;
}

// Sends a warp's share. Rows are dealt from the last warp down: in small batches the first receive.
template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_by_lines(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    // A warp that quantizes rows has fewer registers left for choices.
    send_all_words<kQuantize ? 2 : 8>(warp, call, team);
    const int tokens = call.args.num_tokens;
    const LineShares lines(call.args.format, tokens, team.warps);
    const int shares = lines.shares();
    for (int i = team.warps - 1 - team.warp; i < tokens * shares; i += team.warps) {
        if (!send_lines_of<kQuantize>(warp, call, i / shares, lines[i % shares])) return false;
    }
    return true;
}

}  // namespace ep
