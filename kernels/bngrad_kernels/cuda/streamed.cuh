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

// Whether a block is the last of `count` to arrive at a counter; then it sees what the others wrote before. The
// release-acquire of one thread stands for the whole block, since it lies between two barriers.
__device__ __forceinline__ bool arrives_last(unsigned *counter, int count, Shared &shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = add_acq_rel(counter, 1u) == unsigned(count - 1);
    __syncthreads();
    return shared.is_last;
}

// Publishes a tile's sums. The block that publishes the last tile of a section adds up the section, and the one that
// does so last finishes the group.
template <typename Order>
__device__ __forceinline__ void publish_tile(const Descriptor &d, int64 group, int tile, Shared &shared) {
    const int section = tile / kSectionTiles, first = section * kSectionTiles, sections = int(d.sections);
    unsigned *const arrived = d.arrived + group * (sections + 1);
    const double *partials = partials_of<Order::kSums>(d, group, first);
    int count = min(kSectionTiles, int(d.tiles) - first);
    if (!arrives_last(arrived + section, count, shared)) return;
    if (sections > 1) {
        const Sums<Order::kSums> sum = add_up<Order::kSums>(d, partials, count);
        const int channel = threadIdx.x >> int(d.parts_shift);
        if (!(threadIdx.x & unsigned(d.parts - 1)) && channel < d.group_channels) {
            double *const its = partials_of<Order::kSums>(d, group, d.tiles + section) + channel * Order::kSums;
#pragma unroll
            for (int i = 0; i < Order::kSums; ++i) its[i] = sum.of[i];
        }
        if (!arrives_last(arrived + sections, sections, shared)) return;
        partials = partials_of<Order::kSums>(d, group, d.tiles);
        count = sections;
    }
    finish_group<Order>(d, group, partials, count);
    __syncthreads();
    if (threadIdx.x == 0) store_release(d.ready + group, 1u);
}

// A load that acquires empties the multiprocessor's cache, so only the last one does.
__device__ __forceinline__ void wait_for_group(const Descriptor &d, int64 group) {
    if (threadIdx.x == 0) {
        while (!load_relaxed(d.ready + group)) __nanosleep(32);
        load_acquire(d.ready + group);
    }
    __syncthreads();
}

template <typename Order, bool vectorised>
struct Streamed {
    static __device__ __forceinline__ void compute(const Descriptor &d, const WorkTile &work_tile,
                                                   TileScheduler &scheduler, Shared &shared) {
        if constexpr (Order::kIsTraining) {
            if (work_tile.phase == kApply) {
                apply_tile<Order, vectorised, false>(d, work_tile.group, work_tile.tile, shared, [&] {
                    wait_for_group(d, work_tile.group);
                    scheduler.fetch_index();
                    copy_coefficients<Order>(d, work_tile.group, shared);
                    scheduler.fetch_tile();
                });
                return;
            }
        }
        scheduler.fetch_index();
        sum_tile<Order, vectorised, false>(d, work_tile.group, work_tile.tile, shared, [&] { scheduler.fetch_tile(); });
        publish_tile<Order>(d, work_tile.group, work_tile.tile, shared);
    }
};

}  // namespace bngrad
