// The first order: x_backprop, scale_backprop and offset_backprop.
#pragma once

#include "passes.cuh"

namespace bngrad {

// How many vectors of each tensor are loaded before the first is used. The registers limit this; writing needs more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
constexpr int kSumBatch = 2, kApplyBatch = 2, kApplyBatchLanes = 8;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200)
constexpr int kSumBatch = 4, kApplyBatch = 2, kApplyBatchLanes = 16;
#else
constexpr int kSumBatch = 4, kApplyBatch = 4, kApplyBatchLanes = 16;
#endif

template <typename T, bool is_training>
struct FirstOrder {
    using Element = T;
    static constexpr bool kIsTraining = is_training;
    static constexpr int kSums = 2, kQuads = 1, kInputs = 2;

    static __device__ __forceinline__ Inputs<kInputs> inputs(const Descriptor &d) { return {{d.y_backprop, d.x}}; }

    // stats: the mean, and scale * rstd.
    static __device__ __forceinline__ void load_stats(const Descriptor &d, int64 channel, Shared &shared) {
        shared.stats[0][threadIdx.x] = load_stat(d, d.reserve_space_1, channel);
        const double rstd = rstd_of(d, load_stat(d, d.reserve_space_2, channel));
        shared.stats[1][threadIdx.x] = float(load_scale(d, channel) * rstd);
    }

    // Sums dy and dy * (x - mean).
    template <bool vectorised>
    struct Summing {
        static constexpr int kLanes = T::kLanes;
        static constexpr int kBatch = vectorised ? kSumBatch : 1;
        float mean[kLanes], gain[kLanes];
        float sum_dy[kLanes], sum_dy_xc[kLanes];

        __device__ __forceinline__ Summing(const Descriptor &d, const TileIterator<T, vectorised> &iterator,
                                           int64 first_channel, const Shared &shared) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const int channel = iterator.channel(d, lane);
                if (is_training) {
                    mean[lane] = load_stat(d, d.reserve_space_1, first_channel + channel);
                } else {
                    mean[lane] = shared.stats[0][channel], gain[lane] = shared.stats[1][channel];
                }
                sum_dy[lane] = sum_dy_xc[lane] = 0;
            }
        }

        __device__ __forceinline__ void add(const Descriptor &d, const TileIterator<T, vectorised> &at,
                                            const uint4 *packs) {
            float dy[kLanes], x[kLanes];
            T::unpack(packs[0], dy);
            T::unpack(packs[1], x);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (at.holds(lane)) {
                    sum_dy[lane] = __fadd_rn(sum_dy[lane], dy[lane]);
                    sum_dy_xc[lane] = __fmaf_rn(dy[lane], __fsub_rn(x[lane], mean[lane]), sum_dy_xc[lane]);
                }
                if (!is_training) dy[lane] = __fmul_rn(gain[lane], dy[lane]);
            }
            if (!is_training) at.store(d.x_backprop, dy);
        }

        __device__ __forceinline__ float get(int sum, int lane) const { return sum ? sum_dy_xc[lane] : sum_dy[lane]; }
    };

    // What `finish` needs of a channel beside its sums.
    struct Constants {
        float scale, mean, reserve_space_2;
    };

    static __device__ __forceinline__ Constants constants(const Descriptor &d, int64 channel) {
        return {load_scale(d, channel), load_stat(d, d.reserve_space_1, channel),
                load_stat(d, d.reserve_space_2, channel)};
    }

    // The coefficients: gain, mean of dy, slope, mean of x.
    static __device__ __forceinline__ void finish(const Descriptor &d, int64 channel, const Constants &constants,
                                                  const Sums<kSums> &sum, float4 *coefficients) {
        const double rstd = rstd_of(d, constants.reserve_space_2), elements = double(d.rows) * double(d.inner);
        const bool is_empty = elements == 0;
        store_stat(d, d.offset_backprop, channel, sum.of[0]);
        store_stat(d, d.scale_backprop, channel, is_empty ? 0.0 : sum.of[1] * rstd);
        if (is_training && !is_empty) {
            *coefficients = make_float4(float(constants.scale * rstd), float(sum.of[0] / elements),
                                        float(sum.of[1] / elements * rstd * rstd),
                                        constants.mean);
        }
    }

    template <bool vectorised>
    struct Applying {
        static constexpr int kLanes = T::kLanes, kFit = kApplyBatchLanes / kLanes;
        static constexpr int kBatch = !vectorised ? 1 : kFit < kApplyBatch ? kFit : kApplyBatch;
        float gain[kLanes], mean_dy[kLanes], slope[kLanes], mean[kLanes];

        __device__ __forceinline__ Applying(const Descriptor &d, const TileIterator<T, vectorised> &iterator,
                                            const float4 *coefficients) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const float4 c = coefficients[iterator.channel(d, lane)];
                gain[lane] = c.x, mean_dy[lane] = c.y, slope[lane] = c.z, mean[lane] = c.w;
            }
        }

        __device__ __forceinline__ void write(const Descriptor &d, const TileIterator<T, vectorised> &at,
                                            const uint4 *packs) const {
            float dy[kLanes], xc[kLanes];
            T::unpack(packs[0], dy);
            T::unpack(packs[1], xc);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const float centred = __fsub_rn(dy[lane], mean_dy[lane]);
                xc[lane] = __fsub_rn(xc[lane], mean[lane]);
                dy[lane] = __fmul_rn(gain[lane], __fmaf_rn(-slope[lane], xc[lane], centred));
            }
            at.store(d.x_backprop, dy);
        }
    };
};

}  // namespace bngrad
