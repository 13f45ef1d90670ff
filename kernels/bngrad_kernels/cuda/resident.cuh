// The resident kernel: a work tile is a whole group of channels (kReside), which one block keeps in its shared memory
// between the two passes. It adds up the same terms as the streamed kernel, in the same order.
#pragma once

#include "passes.cuh"
#include "tile_scheduler.cuh"

namespace bngrad {

template <typename Order>
struct Resident {
    static __device__ __forceinline__ void compute(const Descriptor &d, const WorkTile &work_tile,
                                                   TileScheduler &scheduler, Shared &shared) {
        copy_group_to_shared<Order>(d, work_tile.group);
#pragma unroll 1
        for (int tile = 0; tile < int(d.tiles); ++tile) {
            sum_tile<Order, true, true>(d, work_tile.group, tile, shared, [] {});
            __syncthreads();
        }
        scheduler.fetch_index();
        finish_group<Order>(d, work_tile.group, partials_of<Order::kSums>(d, work_tile.group, 0), int(d.tiles));
        scheduler.fetch_tile();
        __syncthreads();
        copy_coefficients<Order>(d, work_tile.group, shared);
#pragma unroll 1
        for (int tile = 0; tile < int(d.tiles); ++tile) {
            apply_tile<Order, true, true>(d, work_tile.group, tile, shared, [] {});
        }
    }
};

}  // namespace bngrad
