#include "launch/host/group.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "fabric/queue/status.h"
#include "launch/host/group.inl"

namespace ep {

HostGroup::HostGroup(const Heap& heap, std::vector<int> ranks, std::vector<char*> heaps,
                     Schedule schedule, std::chrono::duration<double> timeout, SoftwareNic* nic)
    : heap_(heap), ranks_(std::move(ranks)), nic_(nic), schedule_(schedule) {
    if (schedule_.seed) {
        network_ = std::make_unique<SimulatedNetwork>(schedule_.lost_signal);
        seeded_ =
            std::make_unique<SeededExecutor>(*schedule_.seed, network_.get(), schedule_.stall);
    }
    std::vector<ControlBlock*> controls;
    for (char* base : heaps)
        controls.push_back(reinterpret_cast<ControlBlock*>(base + heap_.control()));
    if (nic_)
        queues_ = std::make_unique<HostQueues>(*nic_, heap_, ranks_.front(), heaps,
                                               heap_.topology.ranks_per_node);
    for (int rank : ranks_) {
        own_heaps_.push_back(heaps[rank]);
        states_.push_back({rank, controls[rank], controls, timeout});
        states_.back().waited = reinterpret_cast<uint64_t*>(heaps[rank] + heap_.waited());
        fabrics_.push_back(fabric_of(rank, heaps, queues_.get()));
    }
}

AnyHostFabric HostGroup::fabric_of(int rank, const std::vector<char*>& heaps,
                                   const HostQueues* queues) const {
    if (queues) return QueueFabric(queues->params(), rank);
    if (network_) return HostFabric(heap_.topology, rank, heaps, network_.get());
    return MappedHostFabric(heap_.topology, rank, heaps);
}

void HostGroup::run(Count enters, Count finishes, bool begins_call, std::vector<Tasks> phases,
                    const std::function<bool()>& interrupted) {
    bool aborted = false;
    for (RankState& state : states_) {
        state.unfinished = 0;
        aborted |= state.aborted();
    }
    if (aborted) {  // the rings, and maybe what earlier launches left, are unusable
        for (RankState& state : states_) state.give_up();
        return;
    }
    for (RankState& state : states_) {
        if (enters && !state.stalled) RankState::note(state.control->entered.*enters, state.call);
    }
    if (begins_call) {
        for (size_t i = 0; i < ranks_.size(); ++i) {
            std::memcpy(own_heaps_[i] + heap_.waited_before(), own_heaps_[i] + heap_.waited(),
                        heap_.topology.world() * sizeof(uint64_t));
        }
    }
    for (Tasks& tasks : phases) {
        bool any = false;
        for (size_t i = 0; i < ranks_.size(); ++i) {
            if (tasks[i].empty()) continue;
            // A phase must not go on with what the previous one left unfinished.
            const bool goes_on = states_[i].unfinished == 0 && !states_[i].aborted();
            if (!goes_on) {
                tasks[i].clear();
                states_[i].give_up();
            }
            any |= goes_on;
        }
        if (any) run_roles(std::move(tasks), interrupted);
    }
    for (RankState& state : states_) {
        if (finishes && state.unfinished == 0)
            RankState::note(state.control->finished.*finishes, state.call);
    }
}

void HostGroup::run_roles(Tasks tasks_of_rank, const std::function<bool()>& interrupted) {
    auto share = [&](size_t thread, size_t threads) {
        std::vector<RoleTask> tasks;
        for (size_t i = thread; i < tasks_of_rank.size(); i += threads) {
            tasks.insert(tasks.end(), std::make_move_iterator(tasks_of_rank[i].begin()),
                         std::make_move_iterator(tasks_of_rank[i].end()));
        }
        return tasks;
    };
    if (seeded_) return seeded_->run(share(0, 1));
    const size_t threads = std::min<size_t>(schedule_.threads, ranks_.size());
    while (executors_.size() < threads) executors_.push_back(std::make_unique<FiberExecutor>());
    std::vector<std::exception_ptr> errors(threads);
    auto run_share = [&](size_t thread, const std::function<bool()>& ask) {
        try {
            executors_[thread]->run(share(thread, threads), ask);
        } catch (...) {
            errors[thread] = std::current_exception();
            states_[thread].give_up();
            states_[thread].abort(Outcome::Failed);
        }
    };
    {
        std::vector<std::jthread> others;
        for (size_t thread = 1; thread < threads; ++thread)
            others.emplace_back(run_share, thread, nullptr);
        run_share(0, interrupted);
    }
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

uint64_t HostGroup::aborted() const {
    for (const RankState& state : states_) {
        if (const uint64_t word = state.abort_word().load(std::memory_order_acquire)) return word;
    }
    return 0;
}

std::vector<ControlBlock> HostGroup::control_blocks() const {
    const std::vector<ControlBlock*>& everyone = states_.front().everyone;
    std::vector<ControlBlock> copies(everyone.size());
    for (size_t rank = 0; rank < copies.size(); ++rank) copy_status(copies[rank], *everyone[rank]);
    return copies;
}

void HostGroup::note_refusal(uint64_t number, uint64_t word) {
    ControlBlock& control = *states_.front().control;
    RankState::note(control.refused[number % ControlBlock::kRefusals], word);
}

bool HostGroup::finished() const {
    return std::all_of(states_.begin(), states_.end(),
                       [](const RankState& state) { return state.unfinished == 0; });
}

std::pair<std::vector<uint64_t>, std::vector<uint64_t>> HostGroup::waited(size_t index) const {
    const size_t world = heap_.topology.world();
    const auto* all = reinterpret_cast<uint64_t*>(own_heaps_[index] + heap_.waited());
    const auto* before = reinterpret_cast<uint64_t*>(own_heaps_[index] + heap_.waited_before());
    std::vector<uint64_t> last(all, all + world);
    for (size_t rank = 0; rank < world; ++rank) last[rank] -= before[rank];
    return {last, {all, all + world}};
}

void HostGroup::abort(Outcome outcome, const std::string& text) {
    Reason& reason = states_.front().control->reason;
    if (!has_reason_.exchange(true)) {
        const size_t bytes = std::min(text.size(), Reason::kMaxBytes);
        std::memcpy(reason.text, text.data(), bytes);
        std::atomic_ref<uint64_t>(reason.bytes).store(bytes, std::memory_order_release);
    }
    states_.front().abort(outcome);
}

void HostGroup::reset() {
    has_reason_ = false;
    for (size_t i = 0; i < ranks_.size(); ++i) {
        // Calls are numbered from 1 again, so rows of earlier calls must not stay in the rings.
        std::memset(own_heaps_[i], 0, heap_.bytes());
        states_[i].stalled = false;
    }
    if (network_) network_->clear();
}

template void HostGroup::notify<HostWarp>(std::vector<NotifyArgs>, const std::function<bool()>&);
template void HostGroup::dispatch<HostWarp>(std::vector<DispatchArgs>,
                                            const std::function<bool()>&);
template void HostGroup::combine<HostWarp>(std::vector<CombineArgs>, DType,
                                           const std::function<bool()>&);

}  // namespace ep
