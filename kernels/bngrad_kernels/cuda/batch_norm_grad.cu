// The kernels, one for each element type, mode and access: a whole batch of such problems in one launch.
#include "resident.cuh"
#include "streamed.cuh"

namespace bngrad {

// Draws tickets until none is left.
template <typename Engine>
__device__ __forceinline__ void run(const Descriptor *__restrict__ descriptors, const Ticket *__restrict__ tickets,
                                    unsigned count, unsigned *drawn, Shared &shared) {
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) shared.ticket = atomicAdd(drawn, 1u);
        __syncthreads();
        if (shared.ticket >= count) return;
        const Ticket ticket = tickets[shared.ticket];
        Engine::work(descriptors[ticket.descriptor], ticket, shared);
    }
}

}  // namespace bngrad

#define BNGRAD_KERNEL(name, ...)                                                                                     \
    extern "C" __global__ void __launch_bounds__(bngrad::kThreads, bngrad::kBlocksPerProcessor)                      \
        name(const bngrad::Descriptor *descriptors, const bngrad::Ticket *tickets, unsigned count, unsigned *drawn) { \
        __shared__ bngrad::Shared shared;                                                                            \
        bngrad::run<__VA_ARGS__>(descriptors, tickets, count, drawn, shared);                                        \
    }

#define BNGRAD_KERNELS(dtype, Element)                                                          \
    BNGRAD_KERNEL(dtype##_training_resident, bngrad::Resident<bngrad::Element>)                 \
    BNGRAD_KERNEL(dtype##_training_vectors, bngrad::Streamed<bngrad::Element, true, true>)      \
    BNGRAD_KERNEL(dtype##_training_elements, bngrad::Streamed<bngrad::Element, false, true>)    \
    BNGRAD_KERNEL(dtype##_inference_vectors, bngrad::Streamed<bngrad::Element, true, false>)    \
    BNGRAD_KERNEL(dtype##_inference_elements, bngrad::Streamed<bngrad::Element, false, false>)

BNGRAD_KERNELS(float32, Float32)
BNGRAD_KERNELS(float16, Float16)
BNGRAD_KERNELS(bfloat16, BFloat16)
