#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/function.h"
#include "core/heap.h"
#include "core/lines.h"
#include "core/network_flags.h"
#include "core/row.h"
#include "core/topology.h"

namespace ep {

// What the tokens of one rank chose at another, as words of 32 bits in the low halves of words that
// have their call's number, as far as it fits, in the high one. Numbers of words.
struct ChoiceWords {
    static constexpr int kHalves = 2;

    int chunks, local_experts, max_tokens, max_topk;

    // bits: tokens of a chunk with any expert there
    EP_HD size_t present(int chunk) const { return chunk; }
    // rows of an expert
    EP_HD size_t rows(int expert) const { return group(expert / 32) + expert % 32; }
    // bits: tokens of a chunk that chose an expert
    EP_HD size_t tokens(int expert, int chunk) const { return rows(expert) + 32 * (1 + chunk); }
    // what a choice is, at any rank, of the choices of all tokens
    EP_HD size_t expert(size_t choice) const { return group(groups()) + choice; }
    // the halves of its weight
    EP_HD size_t weight(size_t choice, int half) const {
        return expert(choices()) + kHalves * choice + half;
    }
    EP_HD size_t count() const { return weight(choices(), 0); }

    EP_HD int groups() const { return (local_experts + 31) / 32; }
    EP_HD size_t choices() const { return static_cast<size_t>(max_tokens) * max_topk; }

  private:
    EP_HD size_t group(int number) const {
        return chunks + static_cast<size_t>(number) * 32 * (1 + chunks);
    }
};

// What a rank over a network tells of its dispatches: which was the last to send its choices, and
// whether the one before it had been received by then. Those before that one had been.
struct ChoiceFlag {
    uint64_t value;

    static EP_HD ChoiceFlag of(uint64_t call, bool releases_last) {
        return {2 * call + releases_last};
    }
    EP_HD uint64_t sent() const { return value / 2; }
    EP_HD uint64_t received() const { return sent() < 2 ? 0 : sent() - 2 + value % 2; }
};

enum class LowLatencyKind : int { Dispatch, Combine };
enum class LowLatencyHalf : int { Send, Receive };
// What a launch does of a call.
enum class LowLatencyLaunches : int { Send, Receive, Both };

// The low-latency mode's own symmetric heap, beside the buffer's.
//
// A dispatch's row lies in the slot of its source rank and token, a combine's in that of its token
// and k: nobody counts slots. Each kind of call has two banks, used in turn; one is free again once
// its reader has released it. Call numbers, flags and tags only ever grow and are cleared by nobody
// but reset.
//
// With masking a combine's row lies in the slot of its sender, token and choice instead: then
// whatever another rank writes has one writer, and once that one is masked nobody reads it again.
//
// With lines a dispatch's rows and the sums that come back are lines, and what tokens chose and the
// values beside sums are words, that carry their call's number themselves: no flag follows them.
// Sums have a region of their own, since a line's payload is no tag.
struct LowLatencyHeap {
    static constexpr size_t kLine = Heap::kLine;
    static constexpr int kBanks = 2;
    static constexpr int kKinds = 2;
    static constexpr int kHalves = 2;
    static constexpr int kMaxTokens = 1024;  // 32 chunks: a lane a chunk
    static constexpr int kWordsOfValue = 2;  // 32 bits each

    Topology topology;
    int num_experts;
    int max_tokens;  // of a rank
    int max_topk;
    int channels;       // to ranks whose memory is not mapped: at most as many as warps
    bool staged;        // whether there are such ranks
    size_t slot_bytes;  // of the largest row
    bool masking;       // whether calls go on without ranks that stay away
    bool lines;         // all ranks mapped, over links that keep lines whole; not with masking

    LowLatencyHeap() = default;
    LowLatencyHeap(const Topology& ranks, int experts, int tokens, int topk, size_t slot,
                   bool has_staging, int num_channels, bool has_masks = false,
                   bool has_lines = false)
        : topology(ranks),
          num_experts(experts),
          max_tokens(tokens),
          max_topk(topk),
          channels(num_channels),
          staged(has_staging),
          slot_bytes(slot),
          masking(has_masks),
          lines(has_lines),
          row_bytes_(lines ? static_cast<size_t>(Line::count(slot)) * Line::kBytes : slot),
          local_experts_(experts / ranks.world()),
          choice_bytes_(align_up(
              lines ? words().count() * sizeof(uint64_t)
                    : chosen_experts() + static_cast<size_t>(tokens) * topk * sizeof(uint32_t),
              kLine)) {
        size_t end = 0;
        auto part = [&](size_t bytes) { return std::exchange(end, end + align_up(bytes, kLine)); };
        const size_t world = topology.world(), banks = kBanks;
        sent_ = part(kKinds * kLine);
        send_joins_ = part(kKinds * kLine);
        receive_joins_ = part(kKinds * kLine);
        credited_ = part(kBanks * sizeof(uint64_t));
        waited_ = part(kKinds * banks * world * sizeof(uint64_t));
        put_joins_ = part(staged ? kKinds * channels * kLine : 0);
        signalled_ = part(staged ? kKinds * channels * world * sizeof(uint64_t) : 0);
        tokens_sent_ = part(staged ? banks * world * sizeof(uint32_t) : 0);
        released_ = part(kKinds * banks * world * kLine);
        choice_flags_ = part(lines ? 0 : choice_parts() * world * kLine);
        masked_flags_ = part(masking ? world * kLine : 0);
        beat_flags_ = part(masking ? world * kLine : 0);
        row_flags_ = part(staged ? kKinds * channels * world * kLine : 0);
        choices_ = part(banks * world * choice_bytes());
        rows_ = part(banks * world * max_tokens * row_bytes_);
        parts_ = part(banks * max_tokens * slot_bytes *
                      (masking ? world * choices_per_rank() : static_cast<size_t>(max_topk)));
        sums_ = part(lines ? banks * max_tokens * sums_of_token() * row_bytes_ : 0);
        values_ =
            part(lines ? banks * max_tokens * max_topk * kWordsOfValue * sizeof(uint64_t) : 0);
        staged_choices_ = part(staged ? banks * world * choice_bytes() : 0);
        staged_rows_ = part(staged ? banks * (masking ? world : 1) * max_tokens * slot_bytes : 0);
        staged_parts_ =
            part(staged ? banks * world * max_tokens * choices_per_rank() * slot_bytes : 0);
        memberships_ = part(masking ? kHalves * kKinds * banks * world * sizeof(uint64_t) : 0);
        masked_ = part(masking ? world * sizeof(uint64_t) : 0);
        firsts_ = part(masking ? world * sizeof(uint64_t) : 0);
        own_beats_ = part(masking ? kLine : 0);
        all_sent_flags_ = part(masking ? kKinds * world * kLine : 0);
        no_choices_ = part(masking ? choice_bytes() : 0);
        bytes_ = end;
    }

    EP_HD int local_experts() const { return local_experts_; }
    EP_HD int chunks() const { return (max_tokens + 31) / 32; }  // of 32 tokens
    // Bits of a chunk that may be set.
    EP_HD uint32_t tokens_of_chunk(int chunk) const {
        const int left = max_tokens - 32 * chunk;
        return left < 32 ? (uint32_t{1} << left) - 1 : ~uint32_t{0};
    }
    // Most experts of one rank that a token can choose.
    EP_HD int choices_per_rank() const {
        return local_experts() < max_topk ? local_experts() : max_topk;
    }
    EP_HD size_t bytes() const { return bytes_; }
    // All that the network reads and writes, of ranks whose memory is not mapped, begins here. What
    // a rank counts, and knows of masks, lies before and behind.
    size_t network_begin() const { return released_; }
    size_t network_bytes() const { return memberships_ - released_; }

    // --- of this rank ---
    // Calls sent so far.
    EP_HD size_t sent(LowLatencyKind kind) const { return line(sent_, kind); }
    // Warps that were done with their share of a sending or receiving half, over all calls.
    EP_HD size_t send_joins(LowLatencyKind kind) const { return line(send_joins_, kind); }
    EP_HD size_t receive_joins(LowLatencyKind kind) const { return line(receive_joins_, kind); }
    // The same of a channel's warps, whose puts are under way.
    EP_HD size_t put_joins(LowLatencyKind kind, int channel) const {
        return put_joins_ + (static_cast<int>(kind) * channels + channel) * kLine;
    }

    // The last dispatch in a bank that choices could not release any more, and so a credit did.
    EP_HD size_t credited(int bank) const { return credited_ + bank * sizeof(uint64_t); }
    // What the last signal left in the row_flag that this rank has at `rank`.
    EP_HD size_t signalled(LowLatencyKind kind, int number, int rank) const {
        return signalled_ + ((static_cast<int>(kind) * channels + number) *
                                 static_cast<size_t>(topology.world()) +
                             rank) *
                                sizeof(uint64_t);
    }
    // How many tokens the dispatch in a bank sends to `rank`, which is not mapped.
    EP_HD size_t tokens_sent(int bank, int rank) const {
        return tokens_sent_ +
               (bank * static_cast<size_t>(topology.world()) + rank) * sizeof(uint32_t);
    }

    // How long the receiving half that a bank is in has waited for a rank, in nanoseconds: its
    // warps raise it, and the last one makes it 0 again.
    EP_HD size_t waited(LowLatencyKind kind, int bank, int rank) const {
        return waited_ +
               ((static_cast<int>(kind) * kBanks + bank) * static_cast<size_t>(topology.world()) +
                rank) *
                   sizeof(uint64_t);
    }

    // --- flags that others write: numbers of calls ---
    // The last call of a bank that `rank` has received: its memory is free for the next. Of
    // dispatches a rank whose memory is not mapped tells here only what its choices did not.
    EP_HD size_t released(LowLatencyKind kind, int bank, int rank) const {
        return released_ +
               ((static_cast<int>(kind) * kBanks + bank) * topology.world() + rank) * kLine;
    }
    // The last dispatch of which `rank` has sent this part of its choices; a ChoiceFlag if its
    // memory is not mapped.
    EP_HD size_t choice_flag(int rank, int part) const {
        return choice_flags_ + (static_cast<size_t>(part) * topology.world() + rank) * kLine;
    }
    // The last call whose rows `rank` has put here; of several flags, where each of a rank's blocks
    // has one, those that this one is behind. Only of ranks without mapped memory.
    EP_HD size_t row_flag(LowLatencyKind kind, int number, int rank) const {
        return row_flags_ +
               ((number * kKinds + static_cast<int>(kind)) * topology.world() + rank) * kLine;
    }
    // All of these, and with masking masked_flag and beat_flag; of row_flag the first of each kind.
    EP_HD NetworkFlags network_flags() const {
        const int of_all = kKinds * kBanks + choice_parts() + (masking ? 2 : 0);
        return {released_, staged ? of_all + kKinds : 0, topology.world(), of_all, channels, true};
    }

    // --- what the tokens of one rank chose at another, as 32-bit words:
    //       present[chunks], bits: tokens with any expert there;
    //       of each 32 local experts, or fewer at the end: counts[experts], rows of an expert;
    //       tokens[chunks, experts], bits: tokens that chose an expert;
    //       experts[tokens, K] of those that are present: what they chose, at any rank.
    //     Where memory is mapped different warps store them, in parts: the first and the last are
    //     part 0, 32 local experts a part. Over a network one warp puts as much of them as there
    //     is, as part 0 ---
    EP_HD int choice_parts() const { return 1 + (local_experts() + 31) / 32; }
    EP_HD int experts_of_part(int part) const {
        return local_experts_ - 32 * (part - 1) < 32 ? local_experts_ - 32 * (part - 1) : 32;
    }
    EP_HD size_t choice_part(int part) const {  // where it begins
        const size_t words = chunks() + 32 * static_cast<size_t>(part - 1) * (1 + chunks());
        return part ? words * sizeof(uint32_t) : 0;
    }
    EP_HD size_t chosen_experts() const {  // where these begin
        return (chunks() + local_experts_ * static_cast<size_t>(1 + chunks())) * sizeof(uint32_t);
    }
    EP_HD size_t choice_bytes() const { return choice_bytes_; }
    EP_HD size_t choices(int bank, int rank, int part = 0) const {
        return choices_ + (bank * topology.world() + rank) * choice_bytes() + choice_part(part);
    }
    EP_HD size_t staged_choices(int bank, int rank) const {
        return staged_choices_ + (bank * topology.world() + rank) * choice_bytes();
    }

    // --- the same with lines ---
    EP_HD ChoiceWords words() const { return {chunks(), local_experts_, max_tokens, max_topk}; }

    // --- rows ---
    EP_HD size_t row(int bank, int rank, int token) const {
        const size_t region = bank * static_cast<size_t>(topology.world()) + rank;
        return rows_ + (region * max_tokens + token) * row_bytes_;
    }
    // Of the experts of `rank`; choice: which of the token's there.
    EP_HD size_t part(int bank, int rank, int token, int k, int choice) const {
        return parts_ + slot(masking ? slot_of_choice(bank, rank, token, choice)
                                     : slot_of_k(bank, token, k));
    }
    // With lines: the sum that `rank` makes of a token, whose last choice there is k.
    EP_HD size_t sum(int bank, int rank, int token, int k) const {
        const size_t of_token = bank * static_cast<size_t>(max_tokens) + token;
        const int own = topology.world() < max_topk ? rank : k;
        return sums_ + (of_token * sums_of_token() + own) * row_bytes_;
    }
    // With lines: the words of the value that the k-th choice of a token brings back.
    EP_HD size_t value_words(int bank, int token, int k) const {
        return values_ + slot_of_k(bank, token, k) * kWordsOfValue * sizeof(uint64_t);
    }
    // To all ranks, but with masking to `rank`: nobody waits for what was put to a rank that is
    // masked then, and its memory must not be written anew for others.
    EP_HD size_t staged_row(int bank, int rank, int token) const {
        const int region = masking ? bank * topology.world() + rank : bank;
        return staged_rows_ + slot(region * static_cast<size_t>(max_tokens) + token);
    }
    // choice: which of the token's experts at this rank.
    EP_HD size_t staged_part(int bank, int rank, int token, int choice) const {
        return staged_parts_ + slot(slot_of_choice(bank, rank, token, choice));
    }

    // --- with masking, of this rank ---
    // 2 * number of a call + whether the rank takes part in this half of it, for this rank.
    EP_HD size_t membership(LowLatencyHalf half, LowLatencyKind kind, int bank, int rank) const {
        const int which =
            (static_cast<int>(half) * kKinds + static_cast<int>(kind)) * kBanks + bank;
        return memberships_ +
               (which * static_cast<size_t>(topology.world()) + rank) * sizeof(uint64_t);
    }
    // Not 0: this rank has masked `rank`, for good.
    EP_HD size_t masked(int rank) const { return masked_ + rank * sizeof(uint64_t); }
    // 0, or 1 + the rank, of `rank` and this one, that was first to mask the other because of its
    // silence. It lies in the heap of the lower of the two, so that there is one for both.
    EP_HD size_t first_to_mask(int rank) const { return firsts_ + rank * sizeof(uint64_t); }
    EP_HD size_t own_beats() const { return own_beats_; }
    // What a rank without tokens has chosen.
    EP_HD size_t no_choices() const { return no_choices_; }
    // --- flags that others write ---
    // Not 0: `rank` has masked this one, and why (MaskReason).
    EP_HD size_t masked_flag(int rank) const { return masked_flags_ + rank * kLine; }
    // Grows while `rank` waits.
    EP_HD size_t beat_flag(int rank) const { return beat_flags_ + rank * kLine; }
    // The last call of which all that `rank` has to store here is here. Only of mapped ranks.
    EP_HD size_t all_sent_flag(LowLatencyKind kind, int rank) const {
        return all_sent_flags_ +
               (static_cast<int>(kind) * static_cast<size_t>(topology.world()) + rank) * kLine;
    }

  private:
    EP_HD size_t slot_of_choice(int bank, int rank, int token, int choice) const {
        const size_t row =
            (bank * topology.world() + rank) * static_cast<size_t>(max_tokens) + token;
        return row * choices_per_rank() + choice;
    }
    EP_HD int sums_of_token() const {
        return topology.world() < max_topk ? topology.world() : max_topk;
    }
    EP_HD size_t slot_of_k(int bank, int token, int k) const {
        return (bank * static_cast<size_t>(max_tokens) + token) * max_topk + k;
    }
    EP_HD size_t line(size_t first, LowLatencyKind kind) const {
        return first + static_cast<int>(kind) * kLine;
    }
    EP_HD size_t slot(size_t number) const { return number * slot_bytes; }

    size_t row_bytes_;
    // Kept, because a division takes a GPU long.
    int local_experts_;
    size_t choice_bytes_;
    size_t sent_, send_joins_, receive_joins_, credited_, waited_, put_joins_, signalled_,
        tokens_sent_, released_, choice_flags_, masked_flags_, beat_flags_, row_flags_, choices_,
        rows_, parts_, sums_, values_, staged_choices_, staged_rows_, staged_parts_, memberships_,
        masked_, firsts_, own_beats_, all_sent_flags_, no_choices_, bytes_;
};

}  // namespace ep
