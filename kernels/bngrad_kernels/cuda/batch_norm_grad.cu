// One kernel for each order, element type, mode and access. A launch computes a whole batch of problems of its kind.
#include "first_order.cuh"
#include "tile_scheduler.cuh"
#include "resident.cuh"
#include "second_order.cuh"
#include "streamed.cuh"

#define BNGRAD_KERNEL(blocks, name, ...)                                                                     \
    extern "C" __global__ void __launch_bounds__(bngrad::kThreads, blocks)                                   \
        name(const bngrad::Descriptor *descriptors, const bngrad::WorkTile *work_tiles, unsigned tile_count, \
             unsigned *tile_counter) {                                                                       \
        __shared__ bngrad::Shared shared;                                                                    \
        bngrad::TileScheduler scheduler(work_tiles, tile_count, tile_counter, shared);                       \
        bngrad::run<__VA_ARGS__>(descriptors, scheduler, shared);                                            \
    }

#define BNGRAD_STREAMED(blocks, name, ...)                                     \
    BNGRAD_KERNEL(blocks, name##_vectors, bngrad::Streamed<__VA_ARGS__, true>) \
    BNGRAD_KERNEL(blocks, name##_elements, bngrad::Streamed<__VA_ARGS__, false>)

// The numbers are the blocks that a multiprocessor has to hold at a time, which limits the registers.
#define BNGRAD_KERNELS(dtype, Element)                                                                               \
    BNGRAD_KERNEL(2, first_##dtype##_training_resident, bngrad::Resident<bngrad::FirstOrder<bngrad::Element, true>>) \
    BNGRAD_STREAMED(2, first_##dtype##_training, bngrad::FirstOrder<bngrad::Element, true>)                          \
    BNGRAD_STREAMED(2, first_##dtype##_inference, bngrad::FirstOrder<bngrad::Element, false>)                        \
    BNGRAD_STREAMED(1, second_##dtype##_training, bngrad::SecondOrder<bngrad::Element, true>)                        \
    BNGRAD_STREAMED(1, second_##dtype##_inference, bngrad::SecondOrder<bngrad::Element, false>)

BNGRAD_KERNELS(float32, Float32)
BNGRAD_KERNELS(float16, Float16)
BNGRAD_KERNELS(bfloat16, BFloat16)
