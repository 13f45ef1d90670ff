// The tile scheduler: hands out work tiles to blocks until none is left.
#pragma once

#include "descriptor.cuh"
#include "sums.cuh"

namespace bngrad {

// One block's side of the scheduler. The index of the next work tile is fetched while the current one is computed,
// since the atomic takes a while. It is fetched only once the current work tile waits for nothing more: otherwise a
// waiting block could hold a work tile that others wait for.
class TileScheduler {
   public:
    __device__ __forceinline__ TileScheduler(const WorkTile *__restrict__ work_tiles, unsigned tile_count,
                                             unsigned *tile_counter)
        : work_tiles_(work_tiles), tile_count_(tile_count), tile_counter_(tile_counter) {
        fetch_next();
    }

    // Starts to fetch the index of the next work tile.
    __device__ __forceinline__ void fetch_next() {
        if (threadIdx.x == 0) next_ = atomicAdd(tile_counter_, 1u);
    }

    // Gives all threads the work tile whose index was fetched; returns false if there is none.
    __device__ __forceinline__ bool next(WorkTile &work_tile, Shared &shared) const {
        __syncthreads();
        if (threadIdx.x == 0) shared.tile_index = next_;
        __syncthreads();
        if (shared.tile_index >= tile_count_) return false;
        work_tile = work_tiles_[shared.tile_index];
        return true;
    }

   private:
    const WorkTile *work_tiles_;
    unsigned tile_count_;
    unsigned *tile_counter_;
    unsigned next_ = 0;  // in thread 0
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

// Computes work tiles until none is left. Kernel::compute calls fetch_next once for each work tile.
template <typename Kernel>
__device__ __forceinline__ void run(const Descriptor *__restrict__ descriptors, TileScheduler scheduler,
                                    Shared &shared) {
    WorkTile work_tile;
    for (int described = -1; scheduler.next(work_tile, shared);) {
        if (work_tile.descriptor != described) {
            copy_descriptor(descriptors[work_tile.descriptor], shared.descriptor);
            described = work_tile.descriptor;
        }
        Kernel::compute(shared.descriptor, work_tile, scheduler, shared);
    }
}

}  // namespace bngrad
