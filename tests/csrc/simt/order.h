#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// Whether accesses to memory are in an order that PTX's memory model, CUDA's rules for warps and
// the rules of the copy engine promise. Values tell little of that here, where every store is seen
// at once: so each access to tracked memory is compared with the last write of the same bytes, and
// a write with the reads since. Two of them that nothing orders end the program.
//
//   - Lanes of a warp are ordered by __syncwarp only: votes and shuffles order nothing.
//   - Who acquires a flag sees all that was written, and knows of all reads that were over, before
//     its release. A relaxed store tells of the reads only.
//   - Each rank is a GPU: a flag between two of them orders nothing unless both sides name the
//     system's scope.
//   - The copy engine, and the network, see what their warp wrote or acquired only after a fence.
//     What they do is over for those only who waited for it.
namespace simt::order {

enum class Scope { Gpu, System };
enum class Fence { AsyncGlobal, AsyncShared, System };  // for the engine twice, for the network

// Memory of which accesses are compared, until it is forgotten.
void track(const void* memory, size_t bytes, const char* name);
// Bytes of it to which several may write at once, because any of the values will do.
void ignore(const void* memory, size_t bytes);
void forget(const void* memory);

// A launch, whose accesses are ordered after all before it. sync: the lanes of a warp have met.
void begin(unsigned warps, unsigned warps_per_rank);
void end();
void sync(unsigned warp);

// ---- what the current lane does

void read(const void* address, size_t bytes);
void write(const void* address, size_t bytes);
uint64_t acquire(const uint64_t* flag, Scope scope);
void release(uint64_t* flag, uint64_t value, Scope scope);
void relaxed(uint64_t* flag, uint64_t value, Scope scope);
uint64_t fetch_add_acq_rel(uint64_t* flag, uint64_t value, Scope scope);
uint64_t load_relaxed(const uint64_t* word);
uint64_t fetch_add_relaxed(uint64_t* word, uint64_t value);
void compare_and_swap_release(uint64_t* word, uint64_t expected, uint64_t value, Scope scope);
void fence(Fence fence);

// Its bulk stores: what they read until they have, what they write until they have.
void begin_bulk_read(const void* shared, size_t bytes);
void end_bulk_read(const void* shared, size_t bytes);
void begin_bulk_write(const void* global, size_t bytes);
void end_bulk_write(const void* global, size_t bytes);

// ---- what goes on without it: steps of an actor (a barrier's phases, a connection's puts)

struct Actor {
    uint32_t number;  // among warps and actors
    uint32_t steps;   // begun so far
};
using Name = std::array<uintptr_t, 3>;
Actor& actor(const Name& name);  // the one of this name in this launch

// This lane starts an access in step `step`, by the one that its fence was for.
void read_by(const Actor& actor, uint32_t step, const void* address, size_t bytes, Fence fence);
void write_by(const Actor& actor, uint32_t step, const void* address, size_t bytes, Fence fence);
// This lane has waited for the first `steps` steps.
void learn(const Actor& actor, uint32_t steps);

// A signal that arrives after the actor's steps so far, when it has brought a word to `sum`; and a
// lane that finds at least that there.
void signal(const Actor& actor, const uint64_t* word, uint64_t sum);
void acquire_signal(const uint64_t* word, uint64_t found);

// ---- a network card, which does of its own accord what it finds in memory, in steps of its own

// It finds a flag of this memory as it is. Of the system's scope: it is no part of a GPU.
void card_acquire(const Name& card, const uint64_t* flag);
void card_read(const Name& card, const void* address, size_t bytes);
void card_write(const Name& card, void* address, const void* bytes, size_t count);
// It has brought a word to `sum`, after all that it did before.
void card_signal(const Name& card, const uint64_t* word, uint64_t sum);

}  // namespace simt::order
