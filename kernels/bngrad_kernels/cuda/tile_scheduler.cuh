// How a block comes by its work: it draws tickets until none is left.
#pragma once

#include "descriptor.cuh"
#include "sums.cuh"

namespace bngrad {

// A block's end of the queue of tickets. The next one is drawn while the one before is worked on, as the number takes a
// while to come; but only once that has all that it waits for, so that nobody keeps what others may need.
class Queue {
   public:
    __device__ __forceinline__ Queue(const Ticket *__restrict__ tickets, unsigned count, unsigned *drawn)
        : tickets_(tickets), count_(count), drawn_(drawn) {
        draw_ahead();
    }

    // Asks for the number of the next ticket.
    __device__ __forceinline__ void draw_ahead() {
        if (threadIdx.x == 0) next_ = atomicAdd(drawn_, 1u);
    }

    // Gives the next ticket, whose number has been asked for, to all threads; false where there is none.
    __device__ __forceinline__ bool take(Ticket &ticket, Shared &shared) const {
        __syncthreads();
        if (threadIdx.x == 0) shared.ticket = next_;
        __syncthreads();
        if (shared.ticket >= count_) return false;
        ticket = tickets_[shared.ticket];
        return true;
    }

   private:
    const Ticket *tickets_;
    unsigned count_;
    unsigned *drawn_;
    unsigned next_ = 0;  // in thread 0
};

// To shared memory, which streams of data do not push it out of as they do of a cache.
__device__ __forceinline__ void copy_descriptor(const Descriptor &from, Descriptor &to) {
    constexpr int kWords = sizeof(Descriptor) / sizeof(int64);
    static_assert(sizeof(Descriptor) % sizeof(int64) == 0 && kWords <= kThreads);
    if (threadIdx.x < kWords) {
        reinterpret_cast<int64 *>(&to)[threadIdx.x] = reinterpret_cast<const int64 *>(&from)[threadIdx.x];
    }
    __syncthreads();
}

// Works until no ticket is left. Engines draw ahead, once for each ticket.
template <typename Engine>
__device__ __forceinline__ void run(const Descriptor *__restrict__ descriptors, Queue queue, Shared &shared) {
    Ticket ticket;
    for (int described = -1; queue.take(ticket, shared);) {
        if (ticket.descriptor != described) {
            copy_descriptor(descriptors[ticket.descriptor], shared.descriptor);
            described = ticket.descriptor;
        }
        Engine::work(shared.descriptor, ticket, queue, shared);
    }
}

}  // namespace bngrad
