#pragma once

#include <atomic>
#include <cstdint>

#include "core/incident.h"

namespace ep {

// Copies a rank's status, except its abort word, which other ranks write. Both may be in use.
inline void copy_status(ControlBlock& to, const ControlBlock& from) {
    const auto copy = [](void* dst, const void* src, size_t bytes) {
        for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
            auto* word =
                reinterpret_cast<uint64_t*>(const_cast<char*>(static_cast<const char*>(src) + at));
            std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(static_cast<char*>(dst) + at))
                .store(std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire),
                       std::memory_order_release);
        }
    };
    const auto acquire = [](const uint64_t& word) {
        return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word))
            .load(std::memory_order_acquire);
    };
    const auto publish = [](uint64_t& word, uint64_t value) {
        std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
    };
    static_assert(sizeof(Incident) % sizeof(uint64_t) == 0);
    static_assert(sizeof(Calls) % sizeof(uint64_t) == 0 &&
                  Reason::kMaxBytes % sizeof(uint64_t) == 0);
    for (int i = 0; i < ControlBlock::kMaxIncidents; ++i) {
        if (!acquire(from.complete[i])) continue;
        copy(&to.incidents[i], &from.incidents[i], sizeof(Incident));
        publish(to.complete[i], 1);
    }
    if (const uint64_t bytes = acquire(from.reason.bytes)) {
        copy(to.reason.text, from.reason.text, Reason::kMaxBytes);
        publish(to.reason.bytes, bytes);
    }
    // Whoever finds a launch entered must find what the rank refused before it.
    Calls entered{};
    copy(&entered, &from.entered, sizeof(Calls));
    copy(to.refused, from.refused, sizeof(to.refused));
    copy(&to.entered, &entered, sizeof(Calls));
    copy(&to.finished, &from.finished, sizeof(Calls));
    copy(to.sends, from.sends, sizeof(to.sends));
}

}  // namespace ep
