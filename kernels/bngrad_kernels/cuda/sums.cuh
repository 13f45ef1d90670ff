// Adding up. Chains of at most d.chain terms are added in float32; everything from there on is added in float64, in an
// order that the plan alone decides: the lanes and threads of a tile by a fixed tree, the tiles of a strip one after
// the other, the strips of a group by a fixed tree again.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"

namespace bngrad {

struct Shared {
    union {
        float chains[2][8][kThreads];
        double2 warps[kWarps];
    };
    float mean[kMaxGroupChannels];
    float gain[kMaxGroupChannels];
    unsigned ticket;
    unsigned is_last;
};

__device__ __forceinline__ double2 operator+(const double2 &a, const double2 &b) {
    return make_double2(a.x + b.x, a.y + b.y);
}

// The sum over each aligned run of `parts` threads, a power of two up to 32, in each thread of the run.
__device__ __forceinline__ double2 sum_over_parts(double2 value, int parts) {
#pragma unroll 1
    for (int offset = parts / 2; offset > 0; offset /= 2) {
        const double x = __shfl_xor_sync(0xffffffffu, value.x, offset);
        const double y = __shfl_xor_sync(0xffffffffu, value.y, offset);
        value = value + make_double2(x, y);
    }
    return value;
}

// The sums of a tile of one channel, in thread 0.
template <int lanes>
__device__ __forceinline__ double2 sum_channel(const float *sum_dy, const float *sum_dy_xc, Shared &shared) {
    double2 sum = make_double2(0, 0);
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) sum = sum + make_double2(sum_dy[lane], sum_dy_xc[lane]);
    sum = sum_over_parts(sum, 32);
    if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kWarps; ++warp) sum = sum + shared.warps[warp];
    }
    __syncthreads();
    return sum;
}

// The sums of a tile of several channels, that of channel i in the threads from i * parts on. A channel's terms are
// taken row by row, whichever lanes hold them.
template <int lanes, bool vectorised>
__device__ __forceinline__ double2 sum_channels(const Descriptor &d, const float *sum_dy, const float *sum_dy_xc,
                                                Shared &shared) {
#pragma unroll
    for (int lane = 0; lane < lanes; ++lane) {
        shared.chains[0][lane][threadIdx.x] = sum_dy[lane];
        shared.chains[1][lane][threadIdx.x] = sum_dy_xc[lane];
    }
    __syncthreads();
    const int parts = int(d.parts), inner = int(d.inner), vectors = int(d.vectors);
    const int channel = threadIdx.x / parts, part = threadIdx.x % parts;
    const int row_step = parts / inner, element_step = parts % inner, rows = int(d.sweep) / vectors;
    double2 sum = make_double2(0, 0);
    if (channel < d.group_channels) {
#pragma unroll 1
        for (int row = part / inner, element = part % inner; row < rows;) {
            const int column = channel * inner + element;
            const int lane = vectorised ? column % lanes : column / vectors;
            const int thread = row * vectors + (vectorised ? column / lanes : column % vectors);
            sum = sum + make_double2(shared.chains[0][lane][thread], shared.chains[1][lane][thread]);
            row += row_step;
            element += element_step;
            if (element >= inner) {
                element -= inner;
                ++row;
            }
        }
    }
    __syncthreads();
    return sum_over_parts(sum, parts);
}

// The sums of a whole group over its strips, placed like those of a tile.
__device__ __forceinline__ double2 sum_strips(const Descriptor &d, int64 group) {
    const int parts = int(d.parts), channel = threadIdx.x / parts;
    double2 sum = make_double2(0, 0);
    if (channel < d.group_channels) {
        const double2 *partials = d.partials + group * d.strips * d.group_channels + channel;
#pragma unroll 1
        for (int64 strip = threadIdx.x % parts; strip < d.strips; strip += parts) {
            sum = sum + __ldcg(partials + strip * d.group_channels);
        }
    }
    return sum_over_parts(sum, parts);
}

}  // namespace bngrad
