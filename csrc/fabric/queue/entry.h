// Entries and completions of send queues, in the format of mlx5 network cards.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/function.h"

namespace ep {

// A big-endian integer, as network cards use it.
template <class T>
class BigEndian {
  public:
    BigEndian() = default;
    EP_HD BigEndian(T value) : bytes_(swapped(value)) {}
    EP_HD operator T() const { return swapped(bytes_); }

  private:
    static EP_HD T swapped(T value) {
        static_assert(std::endian::native == std::endian::little);
        T result = 0;
        for (size_t i = 0; i < sizeof(T); ++i)
            result = static_cast<T>(result << 8 | (value >> 8 * i & 0xff));
        return result;
    }

    T bytes_;
};

// An entry of a send queue in the format of mlx5 network cards (mlx5dv.h of rdma-core: struct
// mlx5_wqe_ctrl_seg, _raddr_seg, _data_seg, _atomic_seg). Its bytes are the same whether a card or
// a thread of the host carries the queue out: addresses are offsets into the key's region.
struct alignas(64) SendEntry {
    enum Opcode : uint8_t { kWrite = 0x08, kFetchAdd = 0x12 };
    static constexpr uint8_t kReportCompletion = 2 << 2;

    struct Control {
        BigEndian<uint32_t> index_and_opcode;  // the entry's number, modulo 2^16, and what it does
        BigEndian<uint32_t> queue_and_size;    // in units of 16 bytes
        uint8_t signature;
        uint8_t unused[2];
        uint8_t flags;
        BigEndian<uint32_t> immediate;
    };
    struct Remote {
        BigEndian<uint64_t> address;
        BigEndian<uint32_t> key;
        uint32_t unused;
    };
    struct Local {
        BigEndian<uint32_t> bytes;
        BigEndian<uint32_t> key;
        BigEndian<uint64_t> address;
    };
    struct Atomic {
        BigEndian<uint64_t> increment;
        BigEndian<uint64_t> compare;
    };

    Control control;
    Remote remote;
    union {
        struct {
            Local source;
            char unused[16];
        } write;
        struct {
            Atomic atomic;
            Local old_value;  // where the card stores it; not used
        } add;
    };

    EP_HD uint16_t index() const { return static_cast<uint16_t>(control.index_and_opcode >> 8); }
    EP_HD uint8_t opcode() const { return control.index_and_opcode & 0xff; }

    struct Place {
        uint32_t key;  // of its region
        uint64_t address;
    };

    // Writes `bytes` bytes at `src` to `dst`.
    static EP_HD SendEntry write_of(uint16_t index, uint32_t queue, Place dst, Place src,
                                    uint32_t bytes) {
        SendEntry entry = header(index, kWrite, queue, kUnitsOfWrite, dst);
        entry.write.source = {bytes, src.key, src.address};
        return entry;
    }

    // Adds to the word at `flag` of the other side's region. scratch: eight bytes of this side's.
    static EP_HD SendEntry add_of(uint16_t index, uint32_t queue, Place flag, uint64_t increment,
                                  Place scratch) {
        SendEntry entry = header(index, kFetchAdd, queue, kUnitsOfAdd, flag);
        entry.add.atomic = {increment, uint64_t{0}};
        entry.add.old_value = {sizeof(uint64_t), scratch.key, scratch.address};
        return entry;
    }

    // The first eight bytes of an addition, and of this entry, which ring a card's bell.
    struct Begin {
        BigEndian<uint32_t> index_and_opcode, queue_and_size;
    };
    static EP_HD uint64_t begin_of_add(uint16_t index, uint32_t queue) {
        return std::bit_cast<uint64_t>(Begin{numbered(index, kFetchAdd), queue << 8 | kUnitsOfAdd});
    }
    EP_HD uint64_t begin() const {
        return std::bit_cast<uint64_t>(Begin{control.index_and_opcode, control.queue_and_size});
    }

  private:
    static constexpr uint32_t kUnitsOfWrite = 3, kUnitsOfAdd = 4;

    static EP_HD uint32_t numbered(uint16_t index, Opcode opcode) {
        return static_cast<uint32_t>(index) << 8 | opcode;
    }
    static EP_HD SendEntry header(uint16_t index, Opcode opcode, uint32_t queue, uint32_t units,
                                  Place place) {
        SendEntry entry{};
        entry.control.index_and_opcode = numbered(index, opcode);
        entry.control.queue_and_size = queue << 8 | units;
        entry.control.flags = kReportCompletion;
        entry.remote.address = place.address;
        entry.remote.key = place.key;
        return entry;
    }
};
static_assert(sizeof(SendEntry) == 64);

// What remains of an entry that was carried out (mlx5dv.h: struct mlx5_cqe64 and mlx5_err_cqe).
//
// A thread reports all completions of a queue in one place. A card writes them into a ring, one
// place per entry, and the lowest bit of `kind` alternates from round to round.
struct alignas(64) Completion {
    // Values of the upper half of `kind`.
    static constexpr uint64_t kDone = 0, kRequestError = 13, kResponseError = 14, kNothingYet = 15;

    uint8_t unused[54];
    uint8_t vendor_syndrome;
    uint8_t syndrome;  // of an error
    BigEndian<uint32_t> opcode_and_queue;
    BigEndian<uint16_t> entry;  // its number, modulo 2^16
    uint8_t signature;
    uint8_t kind;

    // Reports entry `index` and all before it as done. Called by what carries the queue out.
    void report(uint16_t index, uint64_t how, uint64_t round = 0) {
        const uint64_t word = how << 60 | (round & 1) << 56 | uint64_t{index & 0xffu} << 40 |
                              static_cast<uint64_t>(index >> 8) << 32;
        std::atomic_ref<uint64_t>(*last_word()).store(word, std::memory_order_release);
    }
    // The entry's number, the signature and the kind: one word, which a card writes at once.
    EP_HD uint64_t* last_word() {
        return reinterpret_cast<uint64_t*>(this) + sizeof(*this) / sizeof(uint64_t) - 1;
    }

    static EP_HD uint64_t kind_of(uint64_t last_word) { return last_word >> 60; }
    static EP_HD uint16_t entry_of(uint64_t last_word) {
        return static_cast<uint16_t>((last_word >> 32 & 0xff) << 8 | (last_word >> 40 & 0xff));
    }
    // Whether a place of a ring has its completion for the round-th time.
    static EP_HD bool is_there(uint64_t last_word, uint64_t round) {
        return kind_of(last_word) != kNothingYet && (last_word >> 56 & 1) == (round & 1);
    }
    static EP_HD bool is_error(uint64_t last_word) {
        return kind_of(last_word) == kRequestError || kind_of(last_word) == kResponseError;
    }
};
static_assert(sizeof(Completion) == 64 && offsetof(Completion, entry) == 60);
static_assert(offsetof(Completion, syndrome) == 55);

// The number of the next empty entry, modulo 2^16 (mlx5dv.h: a doorbell record).
struct DoorbellRecord {
    BigEndian<uint32_t> receive, send;
};
static_assert(sizeof(DoorbellRecord) == sizeof(uint64_t));

}  // namespace ep
