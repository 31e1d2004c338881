#include "tools/simulate/phase.h"

#include <algorithm>
#include <utility>

namespace ep {

void VirtualPhase::append(const VirtualPhase& behind, double between) {
    for (size_t rank = 0; rank < ends.size(); ++rank) ends[rank] += between + behind.ends[rank];
    for (int role = 0; role < kRoles; ++role) {
        OfRole& all = roles[role];
        const OfRole& more = behind.roles[role];
        all.warps += more.warps;
        all.time += more.time;
        all.copied += more.copied;
        for (int wait = 0; wait < kWaits; ++wait) all.waited[wait] += more.waited[wait];
    }
    bytes_sent += behind.bytes_sent;
    row_bytes += behind.row_bytes;
    messages += behind.messages;
}

std::vector<char*> heaps_in(char* memory, size_t bytes, int ranks) {
    std::vector<char*> heaps;
    for (int rank = 0; rank < ranks; ++rank) heaps.push_back(memory + rank * bytes);
    return heaps;
}

VirtualLaunch::VirtualLaunch(VirtualCluster& cluster, VirtualCards& cards, int sms)
    : cluster_(cluster), cards_(cards), sms_(sms) {
    cluster.reset_servers();
}

void VirtualLaunch::add(int rank, int sm, Body body) {
    VirtualFiber& fiber = fibers_.emplace_back();
    fiber.rank = rank;
    fiber.sm = sm;
    fiber.time = cluster_.machine.launch;
    cluster_.clock.spawn(fiber, [body = std::move(body), &fiber] { body(fiber); });
}

VirtualPhase VirtualLaunch::run(const OnProgress& on_progress, uint64_t expected_rows) {
    const uint64_t rows = cluster_.rows_moved, messages = cards_.messages(), flags = cards_.flags();
    const double sent = cards_.bytes_sent();
    cluster_.clock.run([&] {
        if (!on_progress) return;
        const uint64_t done = std::min(cluster_.rows_moved - rows, expected_rows);
        on_progress(expected_rows ? static_cast<double>(done) / expected_rows : 0);
    });
    VirtualPhase phase = result();
    phase.bytes_sent = cards_.bytes_sent() - sent;
    phase.row_bytes =
        phase.bytes_sent - VirtualCards::kFlagBytes * static_cast<double>(cards_.flags() - flags);
    phase.messages = cards_.messages() - messages;
    return phase;
}

VirtualPhase VirtualLaunch::result() {
    VirtualPhase phase;
    phase.ends.resize(cluster_.gpus.size());
    const auto add = [&](const VirtualTask& task) {
        VirtualPhase::OfRole& role = phase.roles[static_cast<int>(task.role)];
        ++role.warps;
        role.time += task.ended - task.began;
        role.copied += task.copied;
        for (int wait = 0; wait < kWaits; ++wait) role.waited[wait] += task.waited[wait];
    };
    for (VirtualFiber& fiber : fibers_) {
        phase.ends[fiber.rank] = std::max(phase.ends[fiber.rank], fiber.time);
        fiber.task.ended = fiber.time;
        for (const VirtualTask& task : fiber.earlier) add(task);
        add(fiber.task);
    }
    const double end = *std::max_element(phase.ends.begin(), phase.ends.end());
    const auto busiest = [&](double& share, double busy) { share = std::max(share, busy / end); };
    for (const VirtualGpu& gpu : cluster_.gpus) {
        double busy = 0;
        for (int sm = 0; sm < sms_; ++sm) busy += gpu.sms[sm].busy;
        busiest(phase.sm, busy / sms_);
        busiest(phase.memory, gpu.memory.busy);
        busiest(phase.link_out, gpu.link_out.busy);
        busiest(phase.link_in, gpu.link_in.busy);
        busiest(phase.card, std::max(gpu.card_out.busy, gpu.card_in.busy));
    }
    return phase;
}

}  // namespace ep
