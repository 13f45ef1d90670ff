// The two passes over a tile, and the step between them, for both orders of gradients.
//
// An Order defines the arithmetic. It reads kInputs tensors, and has kSums sums and 4 * kQuads coefficients per
// channel. In inference `load_stats` computes what the only pass needs of a channel; in training each thread loads
// that itself, so that the pass starts at once. `Summing` adds vectors to a thread's chains, one segment at a time,
// and in inference also writes the outputs. `finish` writes a channel's 1-D outputs and its coefficients. `Applying`
// writes vectors of outputs from these coefficients.
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
        static_cast<unsigned short *>(stats)[channel] = (unsigned short)(round_to_bfloat16(round_to_odd(value)));
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

// A resident group's vectors in shared memory: one for each slot, one input after the other.
struct ResidentVectors {
    int slot, slots;  // the thread's next slot, and the number of slots

    __device__ __forceinline__ ResidentVectors(const Descriptor &d, int64 tile)
        : slot(int(tile * d.tile_slots + threadIdx.x)), slots(int(d.slots)) {}

    __device__ __forceinline__ uint4 &vector(int input) const { return dynamic_shared()[input * slots + slot]; }
};

// Where a pass reads its vectors, and whether it copies them to shared memory.
enum class Source { kMemory, kMemoryToShared, kShared };

// Some steps of an iterator: the position of each, and a vector of each input, which may still be on its way.
template <int batch, int count>
struct Steps {
    Position positions[batch];
    uint4 packs[batch][count];
};

// Starts to load up to `batch` of the iterator's next `left` steps.
template <Source source, Access access, int batch, int count, typename Iterator>
__device__ __forceinline__ void load_steps(const Descriptor &d, Iterator &iterator, const Inputs<count> &inputs,
                                           ResidentVectors &resident, int left, Steps<batch, count> &loaded) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        if (i < left) {
            loaded.positions[i] = iterator.position();
#pragma unroll
            for (int k = 0; k < count; ++k) {
                loaded.packs[i][k] = source == Source::kShared
                                         ? resident.vector(k)
                                         : iterator.template load<access>(inputs.of[k], loaded.positions[i]);
            }
            if (source == Source::kShared) resident.slot += int(d.sweep);
            iterator.advance(d);
        }
    }
}

// Calls use(position, packs) for up to `batch` of `left` steps.
template <Source source, int batch, int count, typename Use>
__device__ __forceinline__ void use_steps(const Descriptor &d, ResidentVectors &resident, int left,
                                          const Steps<batch, count> &loaded, const Use &use) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        if (i < left) {
            use(loaded.positions[i], loaded.packs[i]);
            if (source == Source::kMemoryToShared) {
#pragma unroll
                for (int k = 0; k < count; ++k) resident.vector(k) = loaded.packs[i][k];
                resident.slot += int(d.sweep);
            }
        }
    }
}

// Sums a tile and writes its sums to the partials.
template <typename Order, bool vectorised, bool is_resident>
__device__ __forceinline__ void sum_tile(const Descriptor &d, int64 group, int64 tile, Shared &shared) {
    using T = typename Order::Element;
    using Summing = typename Order::template Summing<vectorised>;
    constexpr Source kSource = is_resident ? Source::kMemoryToShared : Source::kMemory;
    constexpr Access kAccess = Order::kIsTraining && !is_resident ? Access::kKeep : Access::kLastUse;
    const int64 first_channel = group * d.group_channels;
    if constexpr (!Order::kIsTraining) {
        if (threadIdx.x < min(d.group_channels, d.channels - first_channel)) {
            Order::load_stats(d, first_channel + threadIdx.x, shared);
        }
        __syncthreads();
    }

    TileIterator<T, vectorised> iterator(d, group, tile);
    Summing summing(d, iterator, first_channel, shared);
    ResidentVectors resident(d, tile);
    double *const partials = partials_of<Order::kSums>(d, group, tile, 0);
    int left = iterator.steps;
#pragma unroll 1
    for (int segment = 0; segment < int(d.segments); ++segment) {
        const int steps = min(left, int(d.chain));
        left -= steps;
        summing.begin_segment();
#pragma unroll 1
        for (int step = 0; step < steps; step += Summing::kBatch) {
            Steps<Summing::kBatch, Order::kInputs> loaded;
            load_steps<kSource, kAccess>(d, iterator, Order::inputs(d), resident, steps - step, loaded);
            use_steps<kSource>(d, resident, steps - step, loaded, [&](const Position &at, const uint4 *packs) {
                summing.add(d, iterator, at, packs);
            });
        }
        if (d.group_channels == 1) {
            sum_channel<Order::kSums, T::kLanes>(summing, segment, partials, shared);
        } else {
            sum_channels<Order::kSums, T::kLanes, vectorised>(d, summing, segment, partials, shared);
        }
    }
}

// Finishes a group whose tiles are all summed: writes its 1-D outputs and its coefficients.
template <typename Order>
__device__ __forceinline__ void finish_group(const Descriptor &d, int64 group) {
    const Sums<Order::kSums> sum = sum_tiles<Order::kSums>(d, group);
    const int64 within = threadIdx.x >> int(d.parts_shift), channel = group * d.group_channels + within;
    if (threadIdx.x & unsigned(d.parts - 1) || within >= d.group_channels || channel >= d.channels) return;
    Order::finish(d, channel, sum, d.coefficients + (group * d.group_channels + within) * Order::kQuads);
}

// Writes the outputs of a tile, with the inputs from memory or, if resident, shared memory. The first steps are on their
// way when it calls `wait`, which returns once the tile's group is finished.
template <typename Order, bool vectorised, bool is_resident, typename Wait>
__device__ __forceinline__ void apply_tile(const Descriptor &d, int64 group, int64 tile, const Wait &wait) {
    using Applying = typename Order::template Applying<vectorised>;
    constexpr Source kSource = is_resident ? Source::kShared : Source::kMemory;
    constexpr int kBatch = is_resident ? 1 : Applying::kBatch;
    TileIterator<typename Order::Element, vectorised> iterator(d, group, tile);
    ResidentVectors resident(d, tile);
    Steps<kBatch, Order::kInputs> loaded;
    load_steps<kSource, Access::kLastUse>(d, iterator, Order::inputs(d), resident, iterator.steps, loaded);
    wait();
    const Applying applying(d, iterator, d.coefficients + group * d.group_channels * Order::kQuads);
#pragma unroll 1
    for (int left = iterator.steps; left > 0; left -= kBatch) {
        use_steps<kSource>(d, resident, left, loaded, [&](const Position &at, const uint4 *packs) {
            applying.write(d, iterator, at, packs);
        });
        load_steps<kSource, Access::kLastUse>(d, iterator, Order::inputs(d), resident, left - kBatch, loaded);
    }
}

}  // namespace bngrad
