#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/function.h"

namespace ep {

// An integer as network cards want it: the highest byte first.
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
// mlx5_wqe_ctrl_seg, _raddr_seg, _data_seg, _atomic_seg). Who carries a queue out, a card or a
// thread of the host, makes no difference to its bytes: addresses are offsets into a region of
// memory, whose key says which.
struct alignas(64) SendEntry {
    enum Opcode : uint8_t { kWrite = 0x08, kFetchAdd = 0x12 };
    static constexpr uint8_t kTellCompletion = 2 << 2;

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
            Local old_value;  // where the card leaves it; nobody reads it
        } add;
    };

    EP_HD uint16_t index() const { return static_cast<uint16_t>(control.index_and_opcode >> 8); }
    EP_HD uint8_t opcode() const { return control.index_and_opcode & 0xff; }

    // Writes bytes [src, src + bytes) of the own region to [dst, dst + bytes) of the other one.
    static EP_HD SendEntry write_of(uint16_t index, uint32_t queue, uint32_t key, uint64_t dst,
                                    uint64_t src, uint32_t bytes) {
        SendEntry entry = header(index, kWrite, queue, 3, key, dst);
        entry.write.source = {bytes, key, src};
        return entry;
    }

    // Adds to the word at `flag` of the other region. scratch: eight bytes of the own one.
    static EP_HD SendEntry add_of(uint16_t index, uint32_t queue, uint32_t key, uint64_t flag,
                                  uint64_t increment, uint64_t scratch) {
        SendEntry entry = header(index, kFetchAdd, queue, 4, key, flag);
        entry.add.atomic = {increment, uint64_t{0}};
        entry.add.old_value = {sizeof(uint64_t), key, scratch};
        return entry;
    }

  private:
    static EP_HD SendEntry header(uint16_t index, Opcode opcode, uint32_t queue, uint32_t units,
                                  uint32_t key, uint64_t address) {
        SendEntry entry{};
        entry.control.index_and_opcode = static_cast<uint32_t>(index) << 8 | opcode;
        entry.control.queue_and_size = queue << 8 | units;
        entry.control.flags = kTellCompletion;
        entry.remote.address = address;
        entry.remote.key = key;
        return entry;
    }
};
static_assert(sizeof(SendEntry) == 64);

// What a card leaves of the last entry that it has carried out (mlx5dv.h: struct mlx5_cqe64). All
// completions of a queue go to one place.
struct alignas(64) Completion {
    // The upper half of `kind`.
    static constexpr uint64_t kDone = 0, kRequestError = 13, kNothingYet = 15;

    uint8_t unused[55];
    uint8_t syndrome;
    BigEndian<uint32_t> opcode_and_queue;
    BigEndian<uint16_t> entry;  // its number, modulo 2^16
    uint8_t signature;
    uint8_t kind;

    // By what carries the queue out: entry `index` is done, and so are those before it.
    void tell(uint16_t index, uint64_t how) {
        const uint64_t word =
            how << 60 | uint64_t{index & 0xffu} << 40 | static_cast<uint64_t>(index >> 8) << 32;
        std::atomic_ref<uint64_t>(*last_word()).store(word, std::memory_order_release);
    }
    // The entry's number, the signature and the kind, which a card writes at once.
    EP_HD uint64_t* last_word() {
        return reinterpret_cast<uint64_t*>(this) + sizeof(*this) / sizeof(uint64_t) - 1;
    }
};
static_assert(sizeof(Completion) == 64 && offsetof(Completion, entry) == 60);

// Where the number of the next empty entry is told, modulo 2^16 (mlx5dv.h: a doorbell record).
struct DoorbellRecord {
    BigEndian<uint32_t> receive, send;
};
static_assert(sizeof(DoorbellRecord) == sizeof(uint64_t));

}  // namespace ep
