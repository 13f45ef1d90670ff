// The kernels, one for each order, element type, mode and access: a whole batch of such problems in one launch.
#include "first_order.cuh"
#include "tile_scheduler.cuh"
#include "resident.cuh"
#include "second_order.cuh"
#include "streamed.cuh"

#define BNGRAD_KERNEL(blocks, name, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(bngrad::kThreads, blocks)                                           \
        name(const bngrad::Descriptor *descriptors, const bngrad::Ticket *tickets, unsigned count, unsigned *drawn) { \
        __shared__ bngrad::Shared shared;                                                                            \
        bngrad::run<__VA_ARGS__>(descriptors, bngrad::Queue(tickets, count, drawn), shared);                          \
    }

#define BNGRAD_STREAMED(blocks, name, ...)                                     \
    BNGRAD_KERNEL(blocks, name##_vectors, bngrad::Streamed<__VA_ARGS__, true>) \
    BNGRAD_KERNEL(blocks, name##_elements, bngrad::Streamed<__VA_ARGS__, false>)

// The numbers say how many blocks a processor holds, hence how many registers there are.
#define BNGRAD_KERNELS(dtype, Element)                                                                               \
    BNGRAD_KERNEL(2, first_##dtype##_training_resident, bngrad::Resident<bngrad::FirstOrder<bngrad::Element, true>>) \
    BNGRAD_STREAMED(2, first_##dtype##_training, bngrad::FirstOrder<bngrad::Element, true>)                          \
    BNGRAD_STREAMED(2, first_##dtype##_inference, bngrad::FirstOrder<bngrad::Element, false>)                        \
    BNGRAD_STREAMED(1, second_##dtype##_training, bngrad::SecondOrder<bngrad::Element, true>)                        \
    BNGRAD_STREAMED(1, second_##dtype##_inference, bngrad::SecondOrder<bngrad::Element, false>)

BNGRAD_KERNELS(float32, Float32)
BNGRAD_KERNELS(float16, Float16)
BNGRAD_KERNELS(bfloat16, BFloat16)
