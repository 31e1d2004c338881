#pragma once

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

// The queues of a card of the tests' own, as NVIDIA's cards of the driver mlx5 have them: what
// another program writes into its rings is read byte by byte, by the numbers of the format's
// description alone. Nothing here is shared with what is tested.

namespace fake_mlx5 {

inline uint64_t number_at(const uint8_t* bytes, int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; ++i) value = value << 8 | bytes[i];
    return value;
}

inline uint64_t load(const void* address) {
    auto* word = const_cast<uint64_t*>(static_cast<const uint64_t*>(address));
    return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
}

// Whole pages, as a driver gives them.
class Pages {
  public:
    explicit Pages(size_t bytes)
        : bytes_(bytes),
          memory_(
              mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
    }
    ~Pages() { munmap(memory_, bytes_); }
    Pages(const Pages&) = delete;
    uint8_t* data() const { return static_cast<uint8_t*>(memory_); }

  private:
    size_t bytes_;
    void* memory_;
};

class Completions {
  public:
    static constexpr uint8_t kDone = 0, kRequestError = 13, kInvalid = 15;

    explicit Completions(uint32_t count) : count_(count), ring_(size_t{64} * count) {
        for (uint32_t i = 0; i < count; ++i) ring_.data()[64 * i + 63] = kInvalid << 4;
    }
    uint32_t count() const { return count_; }
    void* memory() const { return ring_.data(); }

    // syndrome: 0: none.
    void tell(uint32_t queue, uint16_t entry, uint8_t syndrome) {
        uint8_t* place = ring_.data() + 64 * (reported_ & (count_ - 1));
        place[54] = syndrome ? 0x81 : 0;
        place[55] = syndrome;
        const uint8_t kind = syndrome ? kRequestError : kDone;
        const uint8_t end[8] = {0,
                                static_cast<uint8_t>(queue >> 16),
                                static_cast<uint8_t>(queue >> 8),
                                static_cast<uint8_t>(queue),
                                static_cast<uint8_t>(entry >> 8),
                                static_cast<uint8_t>(entry),
                                0,
                                static_cast<uint8_t>(kind << 4 | (reported_ / count_ & 1))};
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place + 56))
            .store(std::bit_cast<uint64_t>(end), std::memory_order_release);
        ++reported_;
    }

  private:
    uint32_t count_;
    Pages ring_;
    uint64_t reported_ = 0;
};

// An entry that was read.
struct Entry {
    bool is_write;
    uint32_t remote_key, local_key, bytes;
    uint64_t remote, local, increment;
    bool tells;  // when it is done
};

class SendRing {
  public:
    SendRing(uint32_t number, uint32_t count)
        : number_(number),
          count_(count),
          entries_(size_t{64} * count),
          record_(4096),
          bell_(4096) {}

    void* entries() const { return entries_.data(); }
    void* record() const { return record_.data(); }
    void* bell() const { return bell_.data() + 0x800; }
    uint32_t count() const { return count_; }

    // The next entry that the bell has rung for, if there is one. is_eager: those of which the
    // record tells since then, too. Throws std::runtime_error where the queue is not kept as a card
    // wants it.
    std::optional<Entry> take(bool is_eager) {
        listen(is_eager);
        if (next_ == heard_) return std::nullopt;
        const uint8_t* bytes = place(next_);
        const uint64_t what = number_at(bytes + 3, 1), units = number_at(bytes + 7, 1);
        if (number_at(bytes + 1, 2) != next_) fail("an entry has another number");
        if (number_at(bytes + 4, 3) != number_) fail("an entry is of another queue");
        const auto is_zero = [&](int at, int count) { return number_at(bytes + at, count) == 0; };
        // what modifies it, its signature, what is immediate, and what is reserved
        if (!is_zero(0, 1) || !is_zero(8, 3) || !is_zero(12, 4) || !is_zero(28, 4))
            fail("an entry has more than it says");
        Entry entry{};
        entry.tells = (bytes[11] & 0x0c) == 0x08;
        if (bytes[11] & ~0x08) fail("an entry wants more than a completion");
        entry.is_write = what == 0x08;
        if (!entry.is_write && what != 0x12) fail("an entry does something else");
        if (units != (entry.is_write ? 3u : 4u)) fail("an entry has another size");
        entry.remote = number_at(bytes + 16, 8);
        entry.remote_key = static_cast<uint32_t>(number_at(bytes + 24, 4));
        const uint8_t* data = bytes + 32;
        if (entry.is_write) {
            if (!is_zero(48, 8) || !is_zero(56, 8)) fail("something lies behind a write");
        } else {
            entry.increment = number_at(bytes + 32, 8);
            if (number_at(bytes + 40, 8)) fail("an addition compares");
            data = bytes + 48;
        }
        entry.bytes = static_cast<uint32_t>(number_at(data, 4));
        entry.local_key = static_cast<uint32_t>(number_at(data + 4, 4));
        entry.local = number_at(data + 8, 8);
        ++next_;
        return entry;
    }
    // Number of the entry that is taken next.
    uint16_t next() const { return next_; }
    void drop() { ++next_; }
    // Whether the bell has rung for it.
    bool is_rung(bool is_eager) {
        listen(is_eager);
        return next_ != heard_;
    }

  private:
    void listen(bool is_eager) {
        const uint64_t rung = load(bell());
        if (rung == last_) return;
        last_ = rung;
        uint8_t bytes[8];
        std::memcpy(bytes, &rung, sizeof bytes);
        const auto last = static_cast<uint16_t>(number_at(bytes + 1, 2));
        if (number_at(bytes + 4, 3) != number_) fail("a bell is of another queue");
        const uint64_t record = load(record_.data());
        std::memcpy(bytes, &record, sizeof bytes);
        const auto told = static_cast<uint16_t>(number_at(bytes + 6, 2));
        if (number_at(bytes, 6)) fail("a record tells of something else");
        if (static_cast<int16_t>(told - last) <= 0) fail("a bell rang before its record");
        if (static_cast<int16_t>(last - next_) >= 0 &&
            std::memcmp(place(last), &rung, sizeof rung) != 0)
            fail("a bell rang with another entry than its last");
        const auto end = is_eager ? told : static_cast<uint16_t>(last + 1);
        if (static_cast<uint16_t>(end - next_) > count_) fail("entries were written over");
        if (static_cast<int16_t>(end - heard_) > 0) heard_ = end;
    }
    const uint8_t* place(uint16_t entry) const {
        return entries_.data() + 64 * (entry & (count_ - 1));
    }
    [[noreturn]] static void fail(const char* what) { throw std::runtime_error(what); }

    uint32_t number_, count_;
    Pages entries_, record_, bell_;
    uint16_t next_ = 0, heard_ = 0;
    uint64_t last_ = 0;
};

}  // namespace fake_mlx5
