// The second order: the gradients of the first order's outputs by y_backprop, x and scale.
//
// With u = grad_x_backprop, a = grad_scale_backprop, b = grad_offset_backprop and xh = (x - mean) * rstd, each output
// is a sum of dy, u, xh and 1, each times a coefficient of the channel.
#pragma once

#include "passes.cuh"

namespace bngrad {

template <typename T, bool is_training>
struct SecondOrder;

// In training the mean and the variance are x's own. One pass computes them together with all other sums, as it
// subtracts a pivot from x: the channel's first element. A pivot is at most sqrt(M) standard deviations from the mean
// of M elements. float64 has room for that, so all additions are float64.
template <typename T>
struct SecondOrder<T, true> {
    using Element = T;
    static constexpr bool kIsTraining = true;
    static constexpr int kSums = 7, kQuads = 3, kInputs = 3;
    enum Sum { kU, kDy, kX, kUDy, kUX, kDyX, kXX };  // of u, dy, x - pivot, and their products

    static __device__ __forceinline__ Inputs<kInputs> inputs(const Descriptor &d) {
        return {{d.grad_x_backprop, d.y_backprop, d.x}};
    }

    // The channel's first element.
    static __device__ __forceinline__ float load_pivot(const Descriptor &d, int64 channel) {
        return d.rows ? T::widen(static_cast<const typename T::Bits *>(d.x)[channel * d.inner]) : 0.f;
    }

    template <bool vectorised>
    struct Summing {
        static constexpr int kLanes = T::kLanes, kBatch = vectorised ? 16 / kLanes : 1;
        double pivot[kLanes];
        double u[kLanes], dy[kLanes], x[kLanes], u_dy[kLanes], u_x[kLanes], dy_x[kLanes], x_x[kLanes];

        __device__ __forceinline__ Summing(const Descriptor &d, const TileIterator<T, vectorised> &iterator,
                                           int64 first_channel, const Shared &) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                pivot[lane] = load_pivot(d, first_channel + iterator.channel(d, lane));
                u[lane] = dy[lane] = x[lane] = u_dy[lane] = u_x[lane] = dy_x[lane] = x_x[lane] = 0;
            }
        }

        __device__ __forceinline__ void add(const Descriptor &, const TileIterator<T, vectorised> &at,
                                            const uint4 *packs) {
            float values[kInputs][kLanes];
#pragma unroll
            for (int i = 0; i < kInputs; ++i) T::unpack(packs[i], values[i]);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (at.holds(lane)) {
                    const double new_u = values[0][lane], new_dy = values[1][lane];
                    const double new_x = values[2][lane] - pivot[lane];
                    u[lane] += new_u;
                    dy[lane] += new_dy;
                    x[lane] += new_x;
                    u_dy[lane] = __fma_rn(new_u, new_dy, u_dy[lane]);
                    u_x[lane] = __fma_rn(new_u, new_x, u_x[lane]);
                    dy_x[lane] = __fma_rn(new_dy, new_x, dy_x[lane]);
                    x_x[lane] = __fma_rn(new_x, new_x, x_x[lane]);
                }
            }
        }

        __device__ __forceinline__ double get(int sum, int lane) const {
            switch (sum) {
                case kU: return u[lane];
                case kDy: return dy[lane];
                case kX: return x[lane];
                case kUDy: return u_dy[lane];
                case kUX: return u_x[lane];
                case kDyX: return dy_x[lane];
                default: return x_x[lane];
            }
        }
    };

    // What `finish` needs of a channel beside its sums.
    struct Constants {
        float scale, a, b, pivot;
    };

    static __device__ __forceinline__ Constants constants(const Descriptor &d, int64 channel) {
        return {load_scale(d, channel), load_stat(d, d.grad_scale_backprop, channel),
                load_stat(d, d.grad_offset_backprop, channel), load_pivot(d, channel)};
    }

    // The formulae of reference.py, with the terms of each tensor collected. The coefficients are: mean; rstd; those of
    // u, xh and 1 in grad_y_backprop; those of dy, u, xh and 1 in grad_x. The error of rounding the mean to float32 is
    // corrected in the coefficients of 1.
    static __device__ __forceinline__ void finish(const Descriptor &d, int64 channel, const Constants &constants,
                                                  const Sums<kSums> &sum, float4 *coefficients) {
        const double m = double(d.rows) * double(d.inner);
        if (m == 0) {
            store_stat(d, d.grad_scale, channel, 0.0);
            return;
        }
        const double scale = constants.scale, a = constants.a;
        const double x_mean = sum.of[kX] / m, u_mean = sum.of[kU] / m, dy_mean = sum.of[kDy] / m;
        const double mean = constants.pivot + x_mean, variance = sum.of[kXX] / m - x_mean * x_mean;
        const double rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + d.epsilon);  // NaN stays
        const double u_xh = rstd * (sum.of[kUX] / m - x_mean * u_mean);
        const double dy_xh = rstd * (sum.of[kDyX] / m - x_mean * dy_mean);
        const double u_p_dy = sum.of[kUDy] / m - u_mean * dy_mean - u_xh * dy_xh;
        store_stat(d, d.grad_scale, channel, rstd * m * u_p_dy);

        const double gain = scale * rstd, rest_xh = (mean - float(mean)) * rstd;
        const double y_by_xh = a - gain * u_xh;
        const double y_by_1 = constants.b - gain * u_mean - y_by_xh * rest_xh;
        const double x_by_dy = rstd * y_by_xh, x_by_u = -gain * rstd * dy_xh;
        const double x_by_xh = -(x_by_dy * dy_xh + x_by_u * u_xh + gain * rstd * u_p_dy);
        const double x_by_1 = -(x_by_dy * dy_mean + x_by_u * u_mean + x_by_xh * rest_xh);
        coefficients[0] = make_float4(float(mean), float(rstd), float(gain), float(y_by_xh));
        coefficients[1] = make_float4(float(y_by_1), float(x_by_dy), float(x_by_u), float(x_by_xh));
        coefficients[2] = make_float4(float(x_by_1), 0, 0, 0);
    }

    template <bool vectorised>
    struct Applying {
        static constexpr int kLanes = T::kLanes, kBatch = vectorised ? 16 / kLanes : 1;
        float mean[kLanes], rstd[kLanes], y_by_u[kLanes], y_by_xh[kLanes], y_by_1[kLanes];
        float x_by_dy[kLanes], x_by_u[kLanes], x_by_xh[kLanes], x_by_1[kLanes];

        __device__ __forceinline__ Applying(const Descriptor &d, const TileIterator<T, vectorised> &iterator,
                                            const float4 *coefficients) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const float4 *const its = coefficients + iterator.channel(d, lane) * kQuads;
                const float4 first = its[0], second = its[1], third = its[2];
                mean[lane] = first.x, rstd[lane] = first.y, y_by_u[lane] = first.z, y_by_xh[lane] = first.w;
                y_by_1[lane] = second.x, x_by_dy[lane] = second.y, x_by_u[lane] = second.z, x_by_xh[lane] = second.w;
                x_by_1[lane] = third.x;
            }
        }

        __device__ __forceinline__ void write(const Descriptor &d, const TileIterator<T, vectorised> &at,
                                              const uint4 *packs) const {
            float u[kLanes], dy[kLanes], x[kLanes];
            T::unpack(packs[0], u);
            T::unpack(packs[1], dy);
            T::unpack(packs[2], x);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const float xh = __fmul_rn(__fsub_rn(x[lane], mean[lane]), rstd[lane]);
                const float by_x = __fmaf_rn(x_by_u[lane], u[lane], __fmaf_rn(x_by_xh[lane], xh, x_by_1[lane]));
                u[lane] = __fmaf_rn(y_by_u[lane], u[lane], __fmaf_rn(y_by_xh[lane], xh, y_by_1[lane]));
                dy[lane] = __fmaf_rn(x_by_dy[lane], dy[lane], by_x);
            }
            at.store(d.grad_y_backprop, u);
            at.store(d.grad_x, dy);
        }
    };
};

// In inference the mean and the variance are given, and one pass computes everything.
template <typename T>
struct SecondOrder<T, false> {
    using Element = T;
    static constexpr bool kIsTraining = false;
    static constexpr int kSums = 1, kQuads = 0, kInputs = 3;

    static __device__ __forceinline__ Inputs<kInputs> inputs(const Descriptor &d) {
        return SecondOrder<T, true>::inputs(d);
    }

    // stats: the mean; the coefficients of u, of xc = x - mean (also that of dy in grad_x), and of 1.
    static __device__ __forceinline__ void load_stats(const Descriptor &d, int64 channel, Shared &shared) {
        const double rstd = rstd_of(d, load_stat(d, d.reserve_space_2, channel));
        shared.stats[0][threadIdx.x] = load_stat(d, d.reserve_space_1, channel);
        shared.stats[1][threadIdx.x] = float(load_scale(d, channel) * rstd);
        shared.stats[2][threadIdx.x] = float(load_stat(d, d.grad_scale_backprop, channel) * rstd);
        shared.stats[3][threadIdx.x] = load_stat(d, d.grad_offset_backprop, channel);
    }

    template <bool vectorised>
    struct Summing {
        static constexpr int kLanes = T::kLanes, kBatch = vectorised ? 16 / kLanes : 1;
        float mean[kLanes], by_u[kLanes], by_xc[kLanes], by_1[kLanes];
        double u_dy[kLanes];

        __device__ __forceinline__ Summing(const Descriptor &d, const TileIterator<T, vectorised> &iterator, int64,
                                           const Shared &shared) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                const int channel = iterator.channel(d, lane);
                mean[lane] = shared.stats[0][channel], by_u[lane] = shared.stats[1][channel];
                by_xc[lane] = shared.stats[2][channel], by_1[lane] = shared.stats[3][channel];
                u_dy[lane] = 0;
            }
        }

        __device__ __forceinline__ void add(const Descriptor &d, const TileIterator<T, vectorised> &at,
                                            const uint4 *packs) {
            float u[kLanes], dy[kLanes], x[kLanes];
            T::unpack(packs[0], u);
            T::unpack(packs[1], dy);
            T::unpack(packs[2], x);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (at.holds(lane)) u_dy[lane] = __fma_rn(u[lane], dy[lane], u_dy[lane]);
                const float xc = __fsub_rn(x[lane], mean[lane]);
                u[lane] = __fmaf_rn(by_u[lane], u[lane], __fmaf_rn(by_xc[lane], xc, by_1[lane]));
                dy[lane] = __fmul_rn(by_xc[lane], dy[lane]);
            }
            at.store(d.grad_y_backprop, u);
            at.store(d.grad_x, dy);
        }

        __device__ __forceinline__ double get(int, int lane) const { return u_dy[lane]; }
    };

    struct Constants {
        float reserve_space_2;
    };

    static __device__ __forceinline__ Constants constants(const Descriptor &d, int64 channel) {
        return {load_stat(d, d.reserve_space_2, channel)};
    }

    static __device__ __forceinline__ void finish(const Descriptor &d, int64 channel, const Constants &constants,
                                                  const Sums<kSums> &sum, float4 *) {
        const bool is_empty = d.rows == 0;
        store_stat(d, d.grad_scale, channel, is_empty ? 0.0 : sum.of[0] * rstd_of(d, constants.reserve_space_2));
    }
};

}  // namespace bngrad
