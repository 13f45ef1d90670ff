// The streamed engine: blocks draw tickets and do their work, in the order of the tickets.
//
// A ticket is one strip of one group of channels: to sum it (kSum), to write its outputs from the group's sums
// (kApply), or both in one pass where the outputs do not depend on the sums (kInfer). The block that sums the last
// strip of a group adds up the group. A block that is to write waits for that, which ends: it waits for tickets drawn
// before its own, each of which some block holds, and summing waits for nothing. So any number of blocks will do, and
// they need not be on the GPU at the same time.
#pragma once

#include "passes.cuh"
#include "tile_scheduler.cuh"

namespace bngrad {

// Leaves a strip's sums to others; the last block to do so for a group finishes it. One thread's word stands for what the
// whole block has written or will read, since it comes behind the one barrier and before the next.
template <typename Order>
__device__ __forceinline__ void leave_strip(const Descriptor &d, int64 group, Shared &shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = add_acq_rel(d.arrived + group, 1u) == unsigned(d.strips - 1);
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
    static __device__ __forceinline__ void work(const Descriptor &d, const Ticket &ticket, Queue &queue,
                                                Shared &shared) {
        if constexpr (Order::kIsTraining) {
            if (ticket.phase == kApply) {
                wait_for_group(d, ticket.group);
                queue.draw_ahead();
                apply_strip<Order, vectorised, false>(d, ticket.group, ticket.strip);
                return;
            }
        }
        queue.draw_ahead();
        sum_strip<Order, vectorised, false>(d, ticket.group, ticket.strip, shared);
        leave_strip<Order>(d, ticket.group, shared);
    }
};

}  // namespace bngrad
