// The two passes over a strip, and what is done between them, of either order of gradients.
//
// An order says what is done with an Element and with a channel's sums. It reads kInputs tensors, and has kSums sums and
// four times kQuads coefficients of each channel. In inference `load_stats` computes what its only pass has to know of a
// channel; in training every thread loads that, so that the pass begins at once. `Summing` takes vectors to chains, a
// tile at a time, and in inference writes the outputs too; `finish` writes a channel's 1-D outputs and its coefficients;
// from these `Applying` writes vectors of outputs.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"
#include "sums.cuh"
#include "tile_iterator.cuh"

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

// The tensors that a pass reads.
template <int count>
struct Inputs {
    const void *of[count];
};

// Where a resident group's vectors are kept in shared memory: one place for each slot, one input behind the other.
struct Kept {
    int slot, slots;  // the thread's next one, and how many there are

    __device__ __forceinline__ Kept(const Descriptor &d, int64 strip)
        : slot(int(strip * d.tiles * d.chain * d.sweep + threadIdx.x)), slots(int(d.rows * d.vectors)) {}

    __device__ __forceinline__ uint4 &place(int input) const { return dynamic_shared()[input * slots + slot]; }
};

// Where a pass has its vectors from, and whether it leaves them in shared memory.
enum class Source { kMemory, kMemoryToKeep, kKept };

// Takes steps of a walk: use(place, packs) gets a vector of each input. Those of `batch` steps are asked for before the
// first is used.
template <Source source, Access access, int batch, int count, typename AnyWalk, typename Use>
__device__ __forceinline__ void take_steps(const Descriptor &d, AnyWalk &walk, const Inputs<count> &inputs, Kept &kept,
                                           int steps, const Use &use) {
#pragma unroll 1
    for (int step = 0; step < steps; step += batch) {
        Place places[batch];
        uint4 packs[batch][count];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (step + i < steps) {
                places[i] = walk.place();
#pragma unroll
                for (int k = 0; k < count; ++k) {
                    packs[i][k] = source == Source::kKept ? kept.place(k)
                                                          : walk.template load<access>(inputs.of[k], places[i]);
                }
                if (source == Source::kKept) kept.slot += int(d.sweep);
                walk.advance(d);
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (step + i < steps) {
                use(places[i], packs[i]);
                if (source == Source::kMemoryToKeep) {
#pragma unroll
                    for (int k = 0; k < count; ++k) kept.place(k) = packs[i][k];
                    kept.slot += int(d.sweep);
                }
            }
        }
    }
}

// Sums a strip, and leaves its sums in the partials.
template <typename Order, bool vectorised, bool is_resident>
__device__ __forceinline__ void sum_strip(const Descriptor &d, int64 group, int64 strip, Shared &shared) {
    using T = typename Order::Element;
    using Summing = typename Order::template Summing<vectorised>;
    constexpr Source kSource = is_resident ? Source::kMemoryToKeep : Source::kMemory;
    constexpr Access kAccess = Order::kIsTraining && !is_resident ? Access::kKeep : Access::kLastUse;
    const int64 first_channel = group * d.group_channels;
    if constexpr (!Order::kIsTraining) {
        if (threadIdx.x < min(d.group_channels, d.channels - first_channel)) {
            Order::load_stats(d, first_channel + threadIdx.x, shared);
        }
        __syncthreads();
    }

    Walk<T, vectorised> walk(d, group, strip);
    Summing summing(d, walk, first_channel, shared);
    Kept kept(d, strip);
    double *const partials = partials_of<Order::kSums>(d, group, strip, 0);
    int left = walk.steps;
#pragma unroll 1
    for (int tile = 0; tile < int(d.tiles); ++tile) {
        const int steps = min(left, int(d.chain));
        left -= steps;
        summing.begin_tile();
        take_steps<kSource, kAccess, Summing::kBatch>(
            d, walk, Order::inputs(d), kept, steps,
            [&](const Place &at, const uint4 *packs) { summing.take(d, walk, at, packs); });
        if (d.group_channels == 1) {
            sum_channel<Order::kSums, T::kLanes>(summing, tile, partials, shared);
        } else {
            sum_channels<Order::kSums, T::kLanes, vectorised>(d, summing, tile, partials, shared);
        }
    }
}

// Adds up a group whose strips are all summed: writes its 1-D outputs and its coefficients.
template <typename Order>
__device__ __forceinline__ void finish_group(const Descriptor &d, int64 group) {
    const Sums<Order::kSums> sum = sum_strips<Order::kSums>(d, group);
    const int64 within = threadIdx.x / d.parts, channel = group * d.group_channels + within;
    if (threadIdx.x % d.parts || within >= d.group_channels || channel >= d.channels) return;
    Order::finish(d, channel, sum, d.coefficients + (group * d.group_channels + within) * Order::kQuads);
}

// Writes the outputs of a strip, whose group is finished, from memory or from what is kept of it.
template <typename Order, bool vectorised, bool is_resident>
__device__ __forceinline__ void apply_strip(const Descriptor &d, int64 group, int64 strip) {
    using Applying = typename Order::template Applying<vectorised>;
    constexpr Source kSource = is_resident ? Source::kKept : Source::kMemory;
    Walk<typename Order::Element, vectorised> walk(d, group, strip);
    const Applying applying(d, walk, d.coefficients + group * d.group_channels * Order::kQuads);
    Kept kept(d, strip);
    take_steps<kSource, Access::kLastUse, is_resident ? 1 : Applying::kBatch>(
        d, walk, Order::inputs(d), kept, walk.steps,
        [&](const Place &at, const uint4 *packs) { applying.write(d, walk, at, packs); });
}

}  // namespace bngrad
