// Adding up. Chains of at most d.chain terms are float32 or float64, as the order of gradients has it; everything from
// there on is added in float64, in an order that the plan alone decides: the lanes and threads of a tile by a fixed tree,
// the tiles of a strip one after the other, the strips of a group by a fixed tree again. Several sums are taken together:
// `chains.get(sum, lane)` is what a thread has of one in a lane.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"

namespace bngrad {

constexpr int kMaxLanes = 8, kMaxSums = 7, kMaxStats = 4;

struct Shared {
    union {
        double chains[kMaxLanes][kThreads];  // or twice as many floats
        double warps[kWarps][kMaxSums];
    };
    float stats[kMaxStats][kMaxGroupChannels];  // of each channel, see passes.cuh
    Descriptor descriptor;                      // of the problem that the block works on
    unsigned ticket;
    unsigned is_last;
};

// The sum over each aligned run of `parts` threads, a power of two up to 32, in each thread of the run.
__device__ __forceinline__ double sum_over_parts(double value, int parts) {
#pragma unroll 1
    for (int offset = parts / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Where the sums of a strip are left.
template <int sums>
__device__ __forceinline__ double *partials_of(const Descriptor &d, int64 group, int64 strip, int64 channel) {
    return d.partials + ((group * d.strips + strip) * d.group_channels + channel) * sums;
}

__device__ __forceinline__ void add_tile(double *partial, int tile, double sum) {
    *partial = tile ? *partial + sum : sum;
}

// Adds the sums of a tile of one channel to the partials.
template <int sums, int lanes, typename Chains>
__device__ __forceinline__ void sum_channel(const Chains &chains, int tile, double *partials, Shared &shared) {
#pragma unroll
    for (int i = 0; i < sums; ++i) {
        double sum = 0;
#pragma unroll
        for (int lane = 0; lane < lanes; ++lane) sum += chains.get(i, lane);
        sum = sum_over_parts(sum, 32);
        if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < sums) {
        double sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += shared.warps[warp][threadIdx.x];
        add_tile(partials + threadIdx.x, tile, sum);
    }
    __syncthreads();
}

// Adds the sums of a tile of several channels to the partials, those of channel i from the threads from i * parts on. A
// channel's terms are taken row by row, whichever lanes hold them.
template <int sums, int lanes, bool vectorised, typename Chains>
__device__ __forceinline__ void sum_channels(const Descriptor &d, const Chains &chains, int tile, double *partials,
                                             Shared &shared) {
    using Number = decltype(chains.get(0, 0));
    constexpr int kAtOnce = sizeof(double) / sizeof(Number), kSize = lanes * kThreads;
    static_assert(sums % kAtOnce == 0);
    Number *const numbers = reinterpret_cast<Number *>(shared.chains);  // (kAtOnce, lanes, kThreads)
    const int parts = int(d.parts), inner = int(d.inner), vectors = int(d.vectors);
    const int channel = threadIdx.x / parts, part = threadIdx.x % parts;
    const int row_step = parts / inner, element_step = parts % inner, rows = int(d.sweep) / vectors;
#pragma unroll 1
    for (int first = 0; first < sums; first += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int lane = 0; lane < lanes; ++lane) {
                numbers[i * kSize + lane * kThreads + threadIdx.x] = chains.get(first + i, lane);
            }
        }
        __syncthreads();
        double sum[kAtOnce] = {};
        if (channel < d.group_channels) {
#pragma unroll 1
            for (int row = part / inner, element = part % inner; row < rows;) {
                const int column = channel * inner + element;
                const int lane = vectorised ? column % lanes : column / vectors;
                const int thread = row * vectors + (vectorised ? column / lanes : column % vectors);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) sum[i] += numbers[i * kSize + lane * kThreads + thread];
                row += row_step;
                element += element_step;
                if (element >= inner) {
                    element -= inner;
                    ++row;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            sum[i] = sum_over_parts(sum[i], parts);
            if (part == 0 && channel < d.group_channels) add_tile(partials + channel * sums + first + i, tile, sum[i]);
        }
        __syncthreads();
    }
}

// The sums of a group's channel over its strips.
template <int sums>
struct Sums {
    double of[sums];
};

// Those of channel i are in the threads from i * parts on.
template <int sums>
__device__ __forceinline__ Sums<sums> sum_strips(const Descriptor &d, int64 group) {
    const int parts = int(d.parts), channel = threadIdx.x / parts;
    Sums<sums> sum = {};
    if (channel < d.group_channels) {
#pragma unroll 1
        for (int64 strip = threadIdx.x % parts; strip < d.strips; strip += parts) {
            const double *const partials = partials_of<sums>(d, group, strip, channel);
#pragma unroll
            for (int i = 0; i < sums; ++i) sum.of[i] += __ldcg(partials + i);
        }
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) sum.of[i] = sum_over_parts(sum.of[i], parts);
    return sum;
}

}  // namespace bngrad
