// The tile scheduler: hands out work tiles to blocks until none is left.
#pragma once

#include "descriptor.cuh"
#include "sums.cuh"

namespace bngrad {

// One block's side of the scheduler. The next work tile is fetched while the current one is computed: first its index,
// by an atomic, then the work tile itself. A block takes its work tiles in their order, so that the first one which is
// not done never waits: what it waits for comes before it.
class TileScheduler {
   public:
    __device__ __forceinline__ TileScheduler(const WorkTile *work_tiles, unsigned tile_count, unsigned *tile_counter,
                                             Shared &shared)
        : work_tiles_(work_tiles), tile_count_(tile_count), tile_counter_(tile_counter), shared_(shared) {
        fetch_index();
        fetch_tile();
    }

    // Starts to fetch the index of the next work tile.
    __device__ __forceinline__ void fetch_index() {
        if (threadIdx.x == 0) index_ = atomicAdd(tile_counter_, 1u);
    }

    // Starts to fetch the next work tile, once its index is there.
    __device__ __forceinline__ void fetch_tile() {
        if (threadIdx.x == 0 && index_ < tile_count_) {
            copy_async(reinterpret_cast<const uint4 *>(work_tiles_ + index_),
                       reinterpret_cast<uint4 *>(&shared_.work_tiles[turn_]));
        }
    }

    // Returns the work tile that was fetched, which stays there until the next one is asked for; null if there is none.
    __device__ __forceinline__ const WorkTile *next() {
        __syncthreads();
        if (threadIdx.x == 0) {
            wait_for_copies();
            shared_.tile_index = index_;
        }
        __syncthreads();
        turn_ ^= 1;
        return shared_.tile_index < tile_count_ ? &shared_.work_tiles[turn_ ^ 1] : nullptr;
    }

   private:
    const WorkTile *work_tiles_;
    unsigned tile_count_;
    unsigned *tile_counter_;
    Shared &shared_;
    unsigned index_ = 0;  // in thread 0, as the next one
    int turn_ = 0;
};

// Copies a descriptor to shared memory, where streaming tensors cannot evict it as they would from a cache.
__device__ __forceinline__ void copy_descriptor(const Descriptor &from, Descriptor &to) {
    constexpr int kWords = sizeof(Descriptor) / sizeof(int64);
    static_assert(sizeof(Descriptor) % sizeof(int64) == 0 && kWords <= kThreads);
    if (threadIdx.x < kWords) {
        reinterpret_cast<int64 *>(&to)[threadIdx.x] = reinterpret_cast<const int64 *>(&from)[threadIdx.x];
    }
    __syncthreads();
}

// Computes work tiles until none is left. Kernel::compute calls fetch_index and then fetch_tile once for each.
template <typename Kernel>
__device__ __forceinline__ void run(const Descriptor *descriptors, TileScheduler &scheduler, Shared &shared) {
    int described = -1;
    while (const WorkTile *work_tile = scheduler.next()) {
        if (work_tile->descriptor != described) {
            copy_descriptor(descriptors[work_tile->descriptor], shared.descriptor);
            described = work_tile->descriptor;
        }
        Kernel::compute(shared.descriptor, *work_tile, scheduler, shared);
    }
}

}  // namespace bngrad
