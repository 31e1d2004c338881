#pragma once

#include "protocol/low_latency.h"

namespace ep {

// Words that hold 32 bits and, above them, the number of their call as far as it fits: what tokens
// chose, and the values beside rows that come back. A word is stored whole, so nobody waits until
// the words before it have arrived, and who reads one waits for that one alone. Both banks have
// words of their own, and all that is read of a call has been stored in it: the word of another
// call with the same low half, 2^32 calls earlier, is never there.

// The words that `rank` stores in the heap of rank `at`.
template <class F>
EP_FN uint64_t* choice_words(const LowLatencyDispatch<F>& call, int at, int rank) {
    return call.fabric.template at<uint64_t>(at, call.heap().choices(call.bank, rank));
}

template <class F, class Args>
EP_FN uint64_t word_with(const LowLatencyCall<F, Args>& call, uint32_t value) {
    return call.number << 32 | value;
}

// The word's number, as a wait has to see it: this call's, or an earlier one.
template <class F, class Args>
EP_FN uint64_t number_of(const LowLatencyCall<F, Args>& call, uint64_t word) {
    const auto behind = static_cast<uint32_t>(call.number - (word >> 32));
    return call.number < behind ? 0 : call.number - behind;
}

// A word that a lane reads, and the rank that stores it (negative: there is none).
struct WordOf {
    int rank;
    const uint64_t* word;
};

template <class F>
EP_FN WordOf chosen_word(const LowLatencyDispatch<F>& call, int rank, size_t number) {
    return {rank, rank < 0 ? nullptr : choice_words(call, call.args.rank, rank) + number};
}

// Reads `most` words a lane, those that word(lane, i) names, once they are there: take(lane, i,
// value), of none a value of 0. The loads of several are under way at once. false: a wait ended
// badly.
template <WarpLike W, class F, class Args, class Word, class Take>
EP_FN bool read_words(W& warp, const LowLatencyCall<F, Args>& call, Wait wait, int lanes, int most,
                      Word&& word, Take&& take) {
    constexpr int kAtOnce = 4;
    struct Batch {
        uint64_t words[kAtOnce];
    };
    typename W::template PerLane<Batch> batch;
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

// Where waits are counted: until something of every rank is there, so that the waits for words
// which follow need not be.
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
