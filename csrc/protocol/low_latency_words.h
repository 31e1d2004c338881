#pragma once

#include "protocol/low_latency.h"

namespace ep {

// Words with inline flags: 32 bits of data, and above them the low 32 bits of their call's number.
// Choices, and the values beside returned rows, travel as words. A word is stored whole, so no
// sender waits for earlier words to arrive and a reader waits for one word alone. Each bank has its
// own words, and each word of a call is stored before it is read, so the word of a call with the
// same low half, 2^32 calls earlier, is never there.

// The words that `rank` stores in the heap of rank `at`.
template <class F>
EP_FN uint64_t* choice_words(const LowLatencyDispatch<F>& call, int at, int rank) {
    return call.fabric.template at<uint64_t>(at, call.heap().choices(call.bank, rank));
}

template <class F, class Args>
EP_FN uint64_t word_with(const LowLatencyCall<F, Args>& call, uint32_t value) {
    return call.number << 32 | value;
}

// The call number of a word in 64 bits: this call's or an earlier one's.
template <class F, class Args>
EP_FN uint64_t number_of(const LowLatencyCall<F, Args>& call, uint64_t word) {
    const auto behind = static_cast<uint32_t>(call.number - (word >> 32));
    return call.number < behind ? 0 : call.number - behind;
}

// A word that a lane reads, and the rank that stores it; negative: there is none.
struct WordOf {
    int rank;
    const uint64_t* word;
};

template <class F>
EP_FN WordOf chosen_word(const LowLatencyDispatch<F>& call, int rank, size_t number) {
    return {rank, rank < 0 ? nullptr : choice_words(call, call.args.rank, rank) + number};
}

// Waits for word(lane, i) of each lane, i < most, and calls take(lane, i, value); a word that does
// not exist has value 0. Several loads are in flight at once. Returns false if a wait failed.
template <WarpLike W, class F, class Args, class Word, class Take>
EP_FN bool read_words(W& warp, const LowLatencyCall<F, Args>& call, Wait wait, int lanes, int most,
                      Word&& word, Take&& take) {
    constexpr int kAtOnce = 4;
    struct Batch {
        uint64_t words[kAtOnce];
    };
    PerLane<W, Batch> batch;
    for (int first = 0; first < most; first += kAtOnce) {
        const int count = lanes_from(first, most, kAtOnce);
        const bool here = warp.wait_all(wait, lanes, [&](int lane) {
            uint64_t* words = batch[lane].words;
            for (int i = 0; i < kAtOnce; ++i) {
                if (i >= count) break;
                const WordOf own = word(lane, first + i);
                words[i] = own.rank < 0 ? word_with(call, 0) : W::load_word(own.word);
            }
            int missing = -1;
            uint64_t stale = 0;
            for (int i = 0; i < kAtOnce; ++i) {
                if (i >= count || words[i] >> 32 == static_cast<uint32_t>(call.number)) continue;
                missing = i;
                stale = words[i];
            }
            if (missing < 0) return nothing_to_wait_for();
            return WaitCondition{number_of(call, stale), call.number,
                                 word(lane, first + missing).rank};
        });
        if (!here) return false;
        warp.lanes(lanes, [&](int lane) {
            for (int i = 0; i < kAtOnce; ++i) {
                if (i < count) take(lane, first + i, static_cast<uint32_t>(batch[lane].words[i]));
            }
        });
    }
    return true;
}

// If waits are measured: waits for something from every rank, so that the waits for words that
// follow need not be measured.
template <WarpLike W, class F>
EP_FN bool count_wait_for_words(W& warp, const LowLatencyDispatch<F>& call) {
    if (!call.args.recv_wait_ns) return true;
    const size_t present = call.heap().words().present(0);
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        const bool here = wait_counted(warp, call, Wait::Choices, lanes, [&](int lane) {
            uint64_t* words = choice_words(call, call.args.rank, first + lane);
            return WaitCondition{number_of(call, W::load_word(words + present)), call.number,
                                 first + lane};
        });
        if (!here) return false;
    }
    return true;
}

}  // namespace ep
