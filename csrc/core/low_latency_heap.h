// Layout of the low-latency mode's symmetric heap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/function.h"
#include "core/heap.h"
#include "core/incident.h"
#include "core/lines.h"
#include "core/network_flags.h"
#include "core/row.h"
#include "core/topology.h"

namespace ep {

// What the tokens of one rank chose at another, as words with inline flags: data in the low half,
// the low 32 bits of the call's number in the high half. Functions return indices of words.
struct ChoiceWords {
    static constexpr int kHalves = 2;

    int chunks, local_experts, max_tokens, max_topk;

    // present: bits of a chunk's tokens that chose any expert there
    EP_HD size_t present(int chunk) const { return chunk; }
    // rows: number of rows for an expert
    EP_HD size_t rows(int expert) const { return group(expert / 32) + expert % 32; }
    // tokens: bits of a chunk's tokens that chose an expert
    EP_HD size_t tokens(int expert, int chunk) const { return rows(expert) + 32 * (1 + chunk); }
    // expert: the expert id, at any rank, of a choice (token * K + k)
    EP_HD size_t expert(size_t choice) const { return group(groups()) + choice; }
    // weight: the halves of a choice's weight
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

// What a rank reports about its dispatches over a network: the last one whose choices it sent, and
// whether it had received the one before it by then. It had received all earlier ones.
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
// Which halves of a call a launch runs.
enum class LowLatencyLaunches : int { Send, Receive, Both };
EP_HD constexpr bool sends(LowLatencyLaunches launches) {
    return launches != LowLatencyLaunches::Receive;
}
EP_HD constexpr bool receives(LowLatencyLaunches launches) {
    return launches != LowLatencyLaunches::Send;
}

// The counter of a half, unless it is of a call in one hop, which counts as a transfer.
EP_HD constexpr uint64_t Calls::* counter_of(LowLatencyKind kind, LowLatencyHalf half) {
    const bool is_dispatch = kind == LowLatencyKind::Dispatch;
    if (half == LowLatencyHalf::Send)
        return is_dispatch ? &Calls::dispatch_sent : &Calls::combine_sent;
    return is_dispatch ? &Calls::dispatch_received : &Calls::combine_received;
}

// The low-latency mode's symmetric heap, separate from the normal mode's.
//
// A dispatch's row lies in the slot of its source rank and token, a combine's in that of its token
// and k, so slots need no counters. Each kind of call has two banks, used in turn; a bank is free
// again once its reader has released it. Call numbers, flags and tags only grow, until a reset
// clears them.
//
// With masking a combine's row lies in the slot of its sender, token and choice instead: then each
// address has one writer, and is never read again once that rank is masked.
//
// With lines a dispatch's rows and combine's sums are lines, and choices and the values beside sums
// are words. Both carry their call's number inline, so no flag follows them. Sums have their own
// region, where no payload of a line lies where a tag is expected.
struct LowLatencyHeap {
    static constexpr size_t kLine = Heap::kLine;
    static constexpr int kBanks = 2;
    static constexpr int kKinds = 2;
    static constexpr int kHalves = 2;
    static constexpr int kWordsOfValue = 2;  // 32 bits each

    Topology topology;
    int num_experts;
    int max_tokens;  // per rank, at most 1024: 32 chunks, one per lane
    int max_topk;
    int channels;       // to unmapped ranks: at most as many as warps
    bool staged;        // whether there are unmapped ranks
    size_t slot_bytes;  // size of the largest row
    bool masking;       // whether calls go on without ranks that stay away
    bool lines;         // all ranks mapped, over links that keep lines whole; never with masking
    // For calls of the normal API in one hop: every combine sums at the expert, so there is no room
    // for rows summed elsewhere.
    bool sums_at_expert;

    LowLatencyHeap() = default;
    LowLatencyHeap(const Topology& ranks, int experts, int tokens, int topk, size_t slot,
                   bool has_staging, int num_channels, bool has_masks = false,
                   bool has_lines = false, bool only_sums_at_expert = false)
        : topology(ranks),
          num_experts(experts),
          max_tokens(tokens),
          max_topk(topk),
          channels(num_channels),
          staged(has_staging),
          slot_bytes(slot),
          masking(has_masks),
          lines(has_lines),
          sums_at_expert(only_sums_at_expert),
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
        heartbeat_flags_ = part(masking ? world * kLine : 0);
        row_flags_ = part(staged ? kKinds * channels * world * kLine : 0);
        choices_ = part(banks * world * choice_bytes());
        rows_ = part(banks * world * max_tokens * row_bytes_);
        const size_t parts_of_token = masking ? world * choices_per_rank() : max_topk;
        parts_ = part(sums_at_expert ? 0 : banks * max_tokens * slot_bytes * parts_of_token);
        sums_ =
            part(lines || sums_at_expert ? banks * max_tokens * sums_of_token() * row_bytes_ : 0);
        values_ =
            part(lines ? banks * max_tokens * max_topk * kWordsOfValue * sizeof(uint64_t) : 0);
        staged_choices_ = part(staged ? banks * world * choice_bytes() : 0);
        staged_rows_ = part(staged ? banks * (masking ? world : 1) * max_tokens * slot_bytes : 0);
        const size_t staged_of_token = sums_at_expert ? 1 : choices_per_rank();
        staged_parts_ =
            part(staged ? banks * world * max_tokens * staged_of_token * slot_bytes : 0);
        memberships_ = part(masking ? kHalves * kKinds * banks * world * sizeof(uint64_t) : 0);
        masked_ = part(masking ? world * sizeof(uint64_t) : 0);
        firsts_ = part(masking ? world * sizeof(uint64_t) : 0);
        own_heartbeats_ = part(masking ? kLine : 0);
        all_sent_flags_ = part(masking ? kKinds * world * kLine : 0);
        no_choices_ = part(masking ? choice_bytes() : 0);
        bytes_ = end;
    }

    EP_HD int local_experts() const { return local_experts_; }
    EP_HD int chunks() const { return (max_tokens + 31) / 32; }  // 32 tokens each
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
    // The memory that the network of unmapped ranks reads and writes begins here. This rank's
    // counters and masks lie before and after it.
    size_t network_begin() const { return released_; }
    size_t network_bytes() const { return memberships_ - released_; }

    // --- this rank's state ---
    // Calls sent so far.
    EP_HD size_t sent(LowLatencyKind kind) const { return line(sent_, kind); }
    // The buffer's number of the last call in a bank, see Calls.
    EP_HD size_t counted(LowLatencyKind kind, int bank) const {
        return sent(kind) + (1 + bank) * sizeof(uint64_t);
    }
    // Warps that have finished their share of a sending or receiving half, over all calls.
    EP_HD size_t send_joins(LowLatencyKind kind) const { return line(send_joins_, kind); }
    EP_HD size_t receive_joins(LowLatencyKind kind) const { return line(receive_joins_, kind); }
    // Warps of a channel that have issued their puts, over all calls.
    EP_HD size_t put_joins(LowLatencyKind kind, int channel) const {
        return put_joins_ + (static_cast<int>(kind) * channels + channel) * kLine;
    }

    // The last dispatch in a bank that a credit released, because it was too late for choices to.
    EP_HD size_t credited(int bank) const { return credited_ + bank * sizeof(uint64_t); }
    // Value of the last signal to this rank's row_flag at `rank`.
    EP_HD size_t signalled(LowLatencyKind kind, int number, int rank) const {
        return signalled_ + ((static_cast<int>(kind) * channels + number) *
                                 static_cast<size_t>(topology.world()) +
                             rank) *
                                sizeof(uint64_t);
    }
    // Number of tokens that the dispatch in a bank sends to `rank`, which is not mapped.
    EP_HD size_t tokens_sent(int bank, int rank) const {
        return tokens_sent_ +
               (bank * static_cast<size_t>(topology.world()) + rank) * sizeof(uint32_t);
    }

    // Nanoseconds that the receiving half of a bank's call has waited for a rank. Its warps raise
    // it, and the last one resets it to 0.
    EP_HD size_t waited(LowLatencyKind kind, int bank, int rank) const {
        return waited_ +
               ((static_cast<int>(kind) * kBanks + bank) * static_cast<size_t>(topology.world()) +
                rank) *
                   sizeof(uint64_t);
    }

    // --- flags written by other ranks: call numbers ---
    // The last call of a bank that `rank` has received: its memory is free for the next. For
    // dispatches an unmapped rank writes it only if its choices did not release the call.
    EP_HD size_t released(LowLatencyKind kind, int bank, int rank) const {
        return released_ +
               ((static_cast<int>(kind) * kBanks + bank) * topology.world() + rank) * kLine;
    }
    // The last dispatch for which `rank` has sent this part of its choices; unmapped: a ChoiceFlag.
    EP_HD size_t choice_flag(int rank, int part) const {
        return choice_flags_ + (static_cast<size_t>(part) * topology.world() + rank) * kLine;
    }
    // The last call whose rows `rank`, which is not mapped, has put here. If each block of a rank
    // has a flag, each covers the rows of its block.
    EP_HD size_t row_flag(LowLatencyKind kind, int number, int rank) const {
        return row_flags_ +
               ((number * kKinds + static_cast<int>(kind)) * topology.world() + rank) * kLine;
    }
    // All of these, and with masking masked_flag and heartbeat_flag; number 0 of each kind of
    // row_flag.
    EP_HD NetworkFlags network_flags() const {
        const int of_all = kKinds * kBanks + choice_parts() + (masking ? 2 : 0);
        return {released_, staged ? of_all + kKinds : 0, topology.world(), of_all, channels, true};
    }

    // --- what the tokens of one rank chose at another, as 32-bit words:
    //       present[chunks]: bits of the tokens that chose any expert there;
    //       for every 32 local experts, or fewer at the end: counts[experts], rows of an expert;
    //       tokens[chunks, experts], bits of the tokens that chose an expert;
    //       experts[tokens, K]: what the present tokens chose, at any rank.
    //     Warps store them to a mapped rank in parts: part 0 is the first and the last array, part
    //     i the i-th group of experts. Over a network one warp puts all of it, as part 0 ---
    EP_HD int choice_parts() const { return 1 + (local_experts() + 31) / 32; }
    EP_HD int experts_of_part(int part) const {
        return local_experts_ - 32 * (part - 1) < 32 ? local_experts_ - 32 * (part - 1) : 32;
    }
    EP_HD size_t choice_part(int part) const {  // its offset
        const size_t words = chunks() + 32 * static_cast<size_t>(part - 1) * (1 + chunks());
        return part ? words * sizeof(uint32_t) : 0;
    }
    EP_HD size_t chosen_experts() const {  // offset of experts[]
        return (chunks() + local_experts_ * static_cast<size_t>(1 + chunks())) * sizeof(uint32_t);
    }
    EP_HD size_t choice_bytes() const { return choice_bytes_; }
    EP_HD size_t choices(int bank, int rank, int part = 0) const {
        return choices_ + (bank * topology.world() + rank) * choice_bytes() + choice_part(part);
    }
    EP_HD size_t staged_choices(int bank, int rank) const {
        return staged_choices_ + (bank * topology.world() + rank) * choice_bytes();
    }

    // --- choices as words, with lines ---
    EP_HD ChoiceWords words() const { return {chunks(), local_experts_, max_tokens, max_topk}; }

    // --- rows ---
    EP_HD size_t row(int bank, int rank, int token) const {
        const size_t region = bank * static_cast<size_t>(topology.world()) + rank;
        return rows_ + (region * max_tokens + token) * row_bytes_;
    }
    // A row from the experts of `rank`. choice: index among the token's choices there.
    EP_HD size_t part(int bank, int rank, int token, int k, int choice) const {
        if (sums_at_expert) return sum(bank, rank, token, k);
        return parts_ + slot(masking ? slot_of_choice(bank, rank, token, choice)
                                     : slot_of_k(bank, token, k));
    }
    // With lines or sums_at_expert: the sum that `rank` makes for a token whose last choice there
    // is k.
    EP_HD size_t sum(int bank, int rank, int token, int k) const {
        const size_t of_token = bank * static_cast<size_t>(max_tokens) + token;
        const int own = topology.world() < max_topk ? rank : k;
        return sums_ + (of_token * sums_of_token() + own) * row_bytes_;
    }
    // With lines: the words of the value that comes back for a token's k-th choice.
    EP_HD size_t value_words(int bank, int token, int k) const {
        return values_ + slot_of_k(bank, token, k) * kWordsOfValue * sizeof(uint64_t);
    }
    // One copy for all ranks, but with masking one per rank: puts to a masked rank are not waited
    // for, so what they read must not be overwritten for other ranks.
    EP_HD size_t staged_row(int bank, int rank, int token) const {
        const int region = masking ? bank * topology.world() + rank : bank;
        return staged_rows_ + slot(region * static_cast<size_t>(max_tokens) + token);
    }
    // choice: index among the token's choices at this rank.
    EP_HD size_t staged_part(int bank, int rank, int token, int choice) const {
        return staged_parts_ + slot(sums_at_expert ? slot_of_token(bank, rank, token)
                                                   : slot_of_choice(bank, rank, token, choice));
    }

    // --- this rank's state with masking ---
    // 2 * call + whether `rank` takes part in this half of it, as this rank sees it.
    EP_HD size_t membership(LowLatencyHalf half, LowLatencyKind kind, int bank, int rank) const {
        const int which =
            (static_cast<int>(half) * kKinds + static_cast<int>(kind)) * kBanks + bank;
        return memberships_ +
               (which * static_cast<size_t>(topology.world()) + rank) * sizeof(uint64_t);
    }
    // Not 0: this rank has masked `rank`, for good.
    EP_HD size_t masked(int rank) const { return masked_ + rank * sizeof(uint64_t); }
    // 0, or 1 + whichever of `rank` and this rank was first to mask the other for its silence. Both
    // use the word in the heap of the lower rank.
    EP_HD size_t first_to_mask(int rank) const { return firsts_ + rank * sizeof(uint64_t); }
    EP_HD size_t own_heartbeats() const { return own_heartbeats_; }
    // The choices of a rank without tokens.
    EP_HD size_t no_choices() const { return no_choices_; }
    // --- flags written by other ranks ---
    // Not 0: `rank` has masked this one, for this reason (MaskReason).
    EP_HD size_t masked_flag(int rank) const { return masked_flags_ + rank * kLine; }
    // Heartbeat of `rank`: grows while it waits.
    EP_HD size_t heartbeat_flag(int rank) const { return heartbeat_flags_ + rank * kLine; }
    // The last call whose stores from `rank`, a mapped one, have all arrived here.
    EP_HD size_t all_sent_flag(LowLatencyKind kind, int rank) const {
        return all_sent_flags_ +
               (static_cast<int>(kind) * static_cast<size_t>(topology.world()) + rank) * kLine;
    }

  private:
    EP_HD size_t slot_of_token(int bank, int rank, int token) const {
        return (bank * topology.world() + rank) * static_cast<size_t>(max_tokens) + token;
    }
    EP_HD size_t slot_of_choice(int bank, int rank, int token, int choice) const {
        return slot_of_token(bank, rank, token) * choices_per_rank() + choice;
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
    // Kept because a division is slow on a GPU.
    int local_experts_;
    size_t choice_bytes_;
    size_t sent_, send_joins_, receive_joins_, credited_, waited_, put_joins_, signalled_,
        tokens_sent_, released_, choice_flags_, masked_flags_, heartbeat_flags_, row_flags_,
        choices_, rows_, parts_, sums_, values_, staged_choices_, staged_rows_, staged_parts_,
        memberships_, masked_, firsts_, own_heartbeats_, all_sent_flags_, no_choices_, bytes_;
};

}  // namespace ep
