// The two passes over a strip, and what is done between them.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"
#include "sums.cuh"
#include "walk.cuh"

namespace bngrad {

__device__ __forceinline__ double load_stat(const Descriptor &d, const void *stats, int64 channel) {
    if (!d.has_bfloat16_stats) return static_cast<const float *>(stats)[channel];
    return __uint_as_float(unsigned(static_cast<const unsigned short *>(stats)[channel]) << 16);
}

__device__ __forceinline__ void store_stat(const Descriptor &d, void *stats, int64 channel, double value) {
    if (!d.has_bfloat16_stats) {
        static_cast<float *>(stats)[channel] = float(value);
    } else {
        static_cast<unsigned short *>(stats)[channel] = (unsigned short)(round_to_bfloat16(float(value)));
    }
}

__device__ __forceinline__ double load_rstd(const Descriptor &d, int64 channel) {
    const double given = load_stat(d, d.reserve_space_2, channel);
    return d.is_inverse_std ? given : 1.0 / sqrt(given + d.epsilon);
}

__device__ __forceinline__ double load_scale(const Descriptor &d, int64 channel) {
    return d.scale ? load_stat(d, d.scale, channel) : 1.0;
}

// Adds up a group whose strips are all summed: writes its outputs and its coefficients.
__device__ __forceinline__ void finish_group(const Descriptor &d, int64 group) {
    const double2 sum = sum_strips(d, group);
    const int64 within = threadIdx.x / d.parts, channel = group * d.group_channels + within;
    if (threadIdx.x % d.parts || within >= d.group_channels || channel >= d.channels) return;
    const double rstd = load_rstd(d, channel), elements = double(d.rows) * double(d.inner);
    const bool is_empty = elements == 0;
    store_stat(d, d.offset_backprop, channel, sum.x);
    store_stat(d, d.scale_backprop, channel, is_empty ? 0.0 : sum.y * rstd);
    if (d.is_training && !is_empty) {
        d.coefficients[group * d.group_channels + within] =
            make_float4(float(load_scale(d, channel) * rstd), float(sum.x / elements),
                        float(sum.y / elements * rstd * rstd), float(load_stat(d, d.mean, channel)));
    }
}

__device__ __forceinline__ void store_partial(const Descriptor &d, int64 group, int64 strip, double2 sum) {
    const int64 within = threadIdx.x / d.parts;
    if (threadIdx.x % d.parts == 0 && within < d.group_channels) {
        d.partials[(group * d.strips + strip) * d.group_channels + within] = sum;
    }
}

// What is done with the vectors of a strip beside summing them.
enum class Also {
    kNothing,
    kInfer,  // x_backprop is written, which does not depend on the sums
    kKeep,   // they are kept in shared memory
};

// Where a resident group's vectors of y_backprop are kept, and behind them those of x: one place for each slot.
struct Kept {
    uint4 *y_backprop, *x;

    __device__ __forceinline__ explicit Kept(const Descriptor &d)
        : y_backprop(dynamic_shared()), x(y_backprop + d.rows * d.vectors) {}
};

// The sums of a strip, that of channel i in the threads from i * parts on.
template <typename T, bool vectorised, Also also>
__device__ __forceinline__ double2 sum_strip(const Descriptor &d, int64 group, int64 strip, Shared &shared) {
    constexpr bool infers = also == Also::kInfer;
    constexpr int kLanes = T::kLanes, kBatch = Walk<T, vectorised>::kSumBatch;
    constexpr Access kAccess = also == Also::kNothing ? Access::kKeep : Access::kLastUse;
    const int64 first_channel = group * d.group_channels;
    if (threadIdx.x < min(d.group_channels, d.channels - first_channel)) {
        const int64 channel = first_channel + threadIdx.x;
        shared.mean[threadIdx.x] = float(load_stat(d, d.mean, channel));
        if (infers) shared.gain[threadIdx.x] = float(load_scale(d, channel) * load_rstd(d, channel));
    }
    __syncthreads();

    Walk<T, vectorised> walk(d, group, strip);
    float mean[kLanes], gain[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
        const int channel = walk.channel(d, lane);
        mean[lane] = shared.mean[channel];
        if (infers) gain[lane] = shared.gain[channel];
    }

    const void *const y_backprop = d.y_backprop, *const x = d.x;
    const Kept kept(d);
    int slot = also == Also::kKeep ? int(strip * d.tiles * d.chain * d.sweep + threadIdx.x) : 0;
    double2 sum = make_double2(0, 0);
    int left = walk.steps;
#pragma unroll 1
    for (int tile = 0; tile < int(d.tiles); ++tile) {
        float sum_dy[kLanes] = {}, sum_dy_xc[kLanes] = {};
        const int steps = min(left, int(d.chain));
        left -= steps;
#pragma unroll 1
        for (int step = 0; step < steps; step += kBatch) {
            Place places[kBatch];
            uint4 packs[2][kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i < steps) {
                    places[i] = walk.place();
                    packs[0][i] = walk.template load<kAccess>(y_backprop, places[i]);
                    packs[1][i] = walk.template load<kAccess>(x, places[i]);
                    walk.advance();
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i < steps) {
                    float dy[kLanes], xc[kLanes];
                    T::unpack(packs[0][i], dy);
                    T::unpack(packs[1][i], xc);
#pragma unroll
                    for (int lane = 0; lane < kLanes; ++lane) {
                        if (vectorised || places[i].lanes >> lane & 1) {
                            sum_dy[lane] = __fadd_rn(sum_dy[lane], dy[lane]);
                            sum_dy_xc[lane] = __fmaf_rn(dy[lane], __fsub_rn(xc[lane], mean[lane]), sum_dy_xc[lane]);
                        }
                        if (infers) dy[lane] = __fmul_rn(gain[lane], dy[lane]);
                    }
                    if (infers) walk.store(d.x_backprop, places[i], dy);
                    if (also == Also::kKeep) {
                        kept.y_backprop[slot] = packs[0][i];
                        kept.x[slot] = packs[1][i];
                        slot += int(d.sweep);
                    }
                }
            }
        }
        sum = sum + (d.group_channels == 1 ? sum_channel<kLanes>(sum_dy, sum_dy_xc, shared)
                                           : sum_channels<kLanes, vectorised>(d, sum_dy, sum_dy_xc, shared));
    }
    return sum;
}

// Writes x_backprop of a strip, whose group is finished, from memory or from what is kept of it.
template <typename T, bool vectorised, bool is_kept>
__device__ __forceinline__ void apply_strip(const Descriptor &d, int64 group, int64 strip) {
    constexpr int kLanes = T::kLanes, kBatch = Walk<T, vectorised>::kApplyBatch;
    Walk<T, vectorised> walk(d, group, strip);
    float gain[kLanes], mean_dy[kLanes], slope[kLanes], mean[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
        const float4 c = __ldcg(d.coefficients + group * d.group_channels + walk.channel(d, lane));
        gain[lane] = c.x, mean_dy[lane] = c.y, slope[lane] = c.z, mean[lane] = c.w;
    }
    const void *const y_backprop = d.y_backprop, *const x = d.x;
    void *const x_backprop = d.x_backprop;
    const Kept kept(d);
    int slot = is_kept ? int(strip * d.tiles * d.chain * d.sweep + threadIdx.x) : 0;
#pragma unroll 1
    for (int step = 0; step < walk.steps; step += kBatch) {
        Place places[kBatch];
        uint4 packs[2][kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (step + i < walk.steps) {
                places[i] = walk.place();
                if (is_kept) {
                    packs[0][i] = kept.y_backprop[slot];
                    packs[1][i] = kept.x[slot];
                    slot += int(d.sweep);
                } else {
                    packs[0][i] = walk.template load<Access::kLastUse>(y_backprop, places[i]);
                    packs[1][i] = walk.template load<Access::kLastUse>(x, places[i]);
                }
                walk.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (step + i < walk.steps) {
                float dy[kLanes], xc[kLanes];
                T::unpack(packs[0][i], dy);
                T::unpack(packs[1][i], xc);
#pragma unroll
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float centred = __fsub_rn(dy[lane], mean_dy[lane]);
                    xc[lane] = __fsub_rn(xc[lane], mean[lane]);
                    dy[lane] = __fmul_rn(gain[lane], __fmaf_rn(-slope[lane], xc[lane], centred));
                }
                walk.store(x_backprop, places[i], dy);
            }
        }
    }
}

}  // namespace bngrad
