// The streamed kernel: blocks take work tiles from the tile scheduler, in its order.
//
// A work tile is one tile of one group of channels, and what to do with it: sum it (kSum), write its outputs from the
// group's sums (kApply), or both in one pass where the outputs do not depend on the sums (kInfer). The block that sums
// the last tile of a group finishes the group. A block with a kApply tile waits for that. The wait always ends: it is
// for work tiles that were handed out earlier, so running blocks hold them, and summing waits for nothing. So the
// kernel completes with any number of blocks, and these need not all be on the GPU at the same time.
#pragma once

#include "passes.cuh"
#include "tile_scheduler.cuh"

namespace bngrad {

// Publishes a tile's sums; the block that publishes the last tile of a group finishes the group. One thread's
// release-acquire stands for the whole block, since it lies between two barriers.
template <typename Order>
__device__ __forceinline__ void publish_tile(const Descriptor &d, int64 group, Shared &shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = add_acq_rel(d.arrived + group, 1u) == unsigned(d.tiles - 1);
    __syncthreads();
    if (!shared.is_last) return;
    finish_group<Order>(d, group);
    __syncthreads();
    if (threadIdx.x == 0) store_release(d.ready + group, 1u);
}

__device__ __forceinline__ void wait_for_group(const Descriptor &d, int64 group) {
    if (threadIdx.x == 0) {
        while (!load_acquire(d.ready + group)) __nanosleep(64);
    }
    __syncthreads();
}

template <typename Order, bool vectorised>
struct Streamed {
    static __device__ __forceinline__ void compute(const Descriptor &d, const WorkTile &work_tile,
                                                   TileScheduler &scheduler, Shared &shared) {
        if constexpr (Order::kIsTraining) {
            if (work_tile.phase == kApply) {
                apply_tile<Order, vectorised, false>(d, work_tile.group, work_tile.tile, [&] {
                    wait_for_group(d, work_tile.group);
                    scheduler.fetch_next();
                });
                return;
            }
        }
        scheduler.fetch_next();
        sum_tile<Order, vectorised, false>(d, work_tile.group, work_tile.tile, shared);
        publish_tile<Order>(d, work_tile.group, shared);
    }
};

}  // namespace bngrad
