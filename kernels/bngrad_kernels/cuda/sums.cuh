// Summation. A thread's chains of at most d.tile_steps terms are float32 in the first order, float64 in the second. All
// further additions are float64, in an order that the plan alone decides: the lanes and threads of a tile, the tiles
// of a section and the sections of a group, each by a fixed tree. Several sums are computed together;
// `chains.get(sum, lane)` is a thread's part of one sum in one lane.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"

namespace bngrad {

constexpr int kMaxLanes = 8, kMaxSums = 7, kMaxQuads = 3, kMaxStats = 4;
constexpr int kLaneStride = kThreads + 1;  // neighbouring lanes lie in different banks

struct Shared {
    union {
        double chains[kMaxLanes][kLaneStride];  // or twice as many floats
        double warps[kWarps][kMaxSums];
        float4 coefficients[kMaxGroupChannels * kMaxQuads];
    };
    float stats[kMaxStats][kMaxGroupChannels];  // of each channel, see passes.cuh
    Descriptor descriptor;                      // of the problem that the block works on
    alignas(16) WorkTile work_tiles[2];         // what the block does now and next, by turns
    unsigned tile_index;
    unsigned is_last;  // whether the block was the last to arrive
};

// The sum over each aligned run of `parts` threads, a power of two up to 32, in each thread of the run.
__device__ __forceinline__ double sum_over_parts(double value, int parts) {
#pragma unroll 1
    for (int offset = parts / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// The address of the sums of a tile, or of a section if it counts on after the tiles.
template <int sums>
__device__ __forceinline__ double *partials_of(const Descriptor &d, int64 group, int64 tile) {
    return d.partials + (group * (d.tiles + d.sections) + tile) * d.group_channels * sums;
}

// Writes the sums of a tile of one channel to the partials.
template <int sums, int lanes, typename Chains>
__device__ __forceinline__ void sum_channel(const Chains &chains, double *partials, Shared &shared) {
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
        partials[threadIdx.x] = sum;
    }
}

// Writes the sums of a tile of several channels to the partials. The `parts` threads from i * parts on add up channel
// i. A channel's terms are taken row by row, in whichever lanes they are.
template <int sums, int lanes, bool vectorised, typename Chains>
__device__ __forceinline__ void sum_channels(const Descriptor &d, const Chains &chains, double *partials,
                                             Shared &shared) {
    using Number = decltype(chains.get(0, 0));
    constexpr int kAtOnce = sizeof(double) / sizeof(Number), kSize = lanes * kLaneStride;
    static_assert(sums % kAtOnce == 0);
    Number *const numbers = reinterpret_cast<Number *>(shared.chains);  // (kAtOnce, lanes, kLaneStride)
    const int parts = int(d.parts), inner = int(d.inner), vectors = int(d.vectors), rows = int(d.row_step);
    const int channel = threadIdx.x >> int(d.parts_shift), part = threadIdx.x & unsigned(parts - 1);
    const int row_step = divide(parts, d.inner_reciprocal), element_step = parts - row_step * inner;
    const int first_row = divide(part, d.inner_reciprocal);
#pragma unroll 1
    for (int first = 0; first < sums; first += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int lane = 0; lane < lanes; ++lane) {
                numbers[i * kSize + lane * kLaneStride + threadIdx.x] = chains.get(first + i, lane);
            }
        }
        __syncthreads();
        double sum[kAtOnce] = {};
        if (channel < d.group_channels) {
#pragma unroll 1
            for (int row = first_row, element = part - row * inner; row < rows;) {
                const int column = channel * inner + element;
                const int lane = vectorised ? column % lanes : divide(column, d.vectors_reciprocal);
                const int thread = row * vectors + (vectorised ? column / lanes : column - lane * vectors);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) sum[i] += numbers[i * kSize + lane * kLaneStride + thread];
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
            if (part == 0 && channel < d.group_channels) {
                partials[channel * sums + first + i] = sum[i];
            }
        }
        if (first + kAtOnce < sums) __syncthreads();
    }
}

// The sums of a channel.
template <int sums>
struct Sums {
    double of[sums];
};

// Adds up `count` rows of partials. Channel i's sums end up in the `parts` threads from i * parts on.
template <int sums>
__device__ __forceinline__ Sums<sums> add_up(const Descriptor &d, const double *partials, int count) {
    constexpr int kAtOnce = sums > 2 ? 3 : 8;  // rows on their way at a time, as other blocks wait; -0 changes no sum
    const int parts = int(d.parts), channel = threadIdx.x >> int(d.parts_shift);
    Sums<sums> sum = {};
    if (channel < d.group_channels) {
#pragma unroll 1
        for (int first = threadIdx.x & unsigned(parts - 1); first < count; first += kAtOnce * parts) {
            double terms[kAtOnce][sums];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int row = first + k * parts;
                const double *const its = partials + int64(row * int(d.group_channels) + channel) * sums;
                if constexpr (sums == 2) {
                    const double2 pair =
                        row < count ? __ldcg(reinterpret_cast<const double2 *>(its)) : make_double2(-0.0, -0.0);
                    terms[k][0] = pair.x, terms[k][1] = pair.y;
                } else {
#pragma unroll
                    for (int i = 0; i < sums; ++i) terms[k][i] = row < count ? __ldcg(its + i) : -0.0;
                }
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
                for (int i = 0; i < sums; ++i) sum.of[i] += terms[k][i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) sum.of[i] = sum_over_parts(sum.of[i], parts);
    return sum;
}

}  // namespace bngrad
