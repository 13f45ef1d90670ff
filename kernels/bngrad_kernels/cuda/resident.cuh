// The resident engine: a ticket is a whole group of channels (kReside), which one block keeps in its shared memory
// between the passes. It adds up what the streamed engine adds up, in the same order.
#pragma once

#include "passes.cuh"
#include "tile_scheduler.cuh"

namespace bngrad {

template <typename Order>
struct Resident {
    static __device__ __forceinline__ void work(const Descriptor &d, const Ticket &ticket, Queue &queue,
                                                Shared &shared) {
#pragma unroll 1
        for (int strip = 0; strip < int(d.strips); ++strip) {
            sum_strip<Order, true, true>(d, ticket.group, strip, shared);
        }
        queue.draw_ahead();
        __syncthreads();
        finish_group<Order>(d, ticket.group);
        __syncthreads();
#pragma unroll 1
        for (int strip = 0; strip < int(d.strips); ++strip) apply_strip<Order, true, true>(d, ticket.group, strip);
    }
};

}  // namespace bngrad
