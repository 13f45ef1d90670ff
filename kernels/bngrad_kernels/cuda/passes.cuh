// The two passes over a tile, and the step between them, for both orders of gradients.
//
// An Order defines the arithmetic. It reads kInputs tensors, and has kSums sums and 4 * kQuads coefficients per
// channel. In inference `load_stats` computes what the only pass needs of a channel; in training each thread loads
// that itself, so that the pass starts at once. `Summing` adds vectors to a thread's chains, and in inference also
// writes the outputs. `finish` writes a channel's 1-D outputs and its coefficients, from its sums and what `constants`
// loads while these are added up. `Applying` writes vectors of outputs from the coefficients.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"
#include "sums.cuh"
#include "tile_iterator.cuh"

namespace bngrad {

__device__ __forceinline__ float load_stat(const Descriptor &d, const void *stats, int64 channel) {
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

__device__ __forceinline__ float load_scale(const Descriptor &d, int64 channel) {
    return d.scale ? load_stat(d, d.scale, channel) : 1.f;
}

// The reciprocal of the standard deviation, from an element of reserve_space_2.
__device__ __forceinline__ double rstd_of(const Descriptor &d, double given) {
    return d.is_inverse_std ? given : 1.0 / sqrt(given + d.epsilon);
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

    __device__ __forceinline__ uint4 *vector(int input) const { return dynamic_shared() + input * slots + slot; }
};

// Where a pass reads its vectors.
enum class Source { kMemory, kShared };

// A thread's way through a tile, with the vectors of the next `batch` steps on their way: each step that is used makes
// room for the next load at once.
template <Source source, Access access, int batch, typename T, bool vectorised, int count>
class Pipeline {
   public:
    using Iterator = TileIterator<T, vectorised>;

    // Starts the first loads.
    __device__ __forceinline__ Pipeline(const Descriptor &d, const Iterator &start, const Inputs<count> &inputs,
                                        int64 tile)
        : used_(start), loaded_(start), inputs_(inputs), resident_(d, tile), left_(start.steps) {
        if (left_ >= batch) {  // without conditions, so that no load waits for another
#pragma unroll
            for (int i = 0; i < batch; ++i) load(d, i);
        } else {
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (i < left_) load(d, i);
            }
        }
    }

    // Calls use(iterator, packs) for each step, where the iterator is at the step.
    template <typename Use>
    __device__ __forceinline__ void for_each(const Descriptor &d, const Use &use) {
#pragma unroll 1
        for (; left_ >= 2 * batch; left_ -= batch) {
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                use_one(d, i, use);
                load(d, i);
            }
        }
#pragma unroll 1
        for (; left_ > 0; left_ -= batch) {
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (i < left_) use_one(d, i, use);
                if (i + batch < left_) load(d, i);
            }
        }
    }

   private:
    template <typename Use>
    __device__ __forceinline__ void use_one(const Descriptor &d, int i, const Use &use) {
        use(used_, packs_[i]);
        used_.advance(d);
    }

    __device__ __forceinline__ void load(const Descriptor &d, int i) {
#pragma unroll
        for (int k = 0; k < count; ++k) {
            packs_[i][k] =
                source == Source::kShared ? *resident_.vector(k) : loaded_.template load<access>(inputs_.of[k]);
        }
        if (source == Source::kShared) resident_.slot += int(d.sweep);
        loaded_.advance(d);
    }

    Iterator used_, loaded_;  // the next step to use, and the next one to load
    Inputs<count> inputs_;
    ResidentVectors resident_;
    int left_;  // how many steps are not used yet
    uint4 packs_[batch][count];
};

// Copies a group to shared memory. Each thread copies the vectors that it will read, all of them at once.
template <typename Order>
__device__ __forceinline__ void copy_group_to_shared(const Descriptor &d, int64 group) {
    const Inputs<Order::kInputs> inputs = Order::inputs(d);
#pragma unroll 1
    for (int tile = 0; tile < int(d.tiles); ++tile) {
        TileIterator<typename Order::Element, true> iterator(d, group, tile);
        ResidentVectors resident(d, tile);
#pragma unroll 1
        for (int step = 0; step < iterator.steps; ++step) {
#pragma unroll
            for (int k = 0; k < Order::kInputs; ++k) copy_async(iterator.address(inputs.of[k]), resident.vector(k));
            resident.slot += int(d.sweep);
            iterator.advance(d);
        }
    }
    wait_for_copies();
}

// Sums a tile and writes its sums to the partials. It calls `overlap` when all inputs are read.
template <typename Order, bool vectorised, bool is_resident, typename Overlap>
__device__ __forceinline__ void sum_tile(const Descriptor &d, int64 group, int64 tile, Shared &shared,
                                         const Overlap &overlap) {
    using T = typename Order::Element;
    using Summing = typename Order::template Summing<vectorised>;
    constexpr Source kSource = is_resident ? Source::kShared : Source::kMemory;
    constexpr Access kAccess = Order::kIsTraining ? Access::kKeep : Access::kLastUse;
    const int64 first_channel = group * d.group_channels;
    if constexpr (!Order::kIsTraining) {
        if (threadIdx.x < min(d.group_channels, d.channels - first_channel)) {
            Order::load_stats(d, first_channel + threadIdx.x, shared);
        }
        __syncthreads();
    }

    const TileIterator<T, vectorised> iterator(d, group, tile);
    Pipeline<kSource, kAccess, Summing::kBatch, T, vectorised, Order::kInputs> pipeline(d, iterator, Order::inputs(d),
                                                                                        tile);
    Summing summing(d, iterator, first_channel, shared);
    pipeline.for_each(d, [&](const TileIterator<T, vectorised> &at, const uint4 *packs) {
        summing.add(d, at, packs);
    });
    overlap();
    double *const partials = partials_of<Order::kSums>(d, group, tile);
    if (d.group_channels == 1) {
        sum_channel<Order::kSums, T::kLanes>(summing, partials, shared);
    } else {
        sum_channels<Order::kSums, T::kLanes, vectorised>(d, summing, partials, shared);
    }
}

// Finishes a group from `count` rows of partials: writes its 1-D outputs and its coefficients.
template <typename Order>
__device__ __forceinline__ void finish_group(const Descriptor &d, int64 group, const double *partials, int count) {
    const int64 within = threadIdx.x >> int(d.parts_shift), channel = group * d.group_channels + within;
    const bool exists = within < d.group_channels && channel < d.channels;
    const typename Order::Constants constants = Order::constants(d, exists ? channel : 0);
    const Sums<Order::kSums> sum = add_up<Order::kSums>(d, partials, count);
    if (threadIdx.x & unsigned(d.parts - 1) || !exists) return;
    Order::finish(d, channel, constants, sum, d.coefficients + (group * d.group_channels + within) * Order::kQuads);
}

// Copies a group's coefficients to shared memory: if each thread read its own from the second-level cache, all blocks
// would crowd at a few of its lines.
template <typename Order>
__device__ __forceinline__ void copy_coefficients(const Descriptor &d, int64 group, Shared &shared) {
    const int first = int(group * d.group_channels) * Order::kQuads, count = int(d.group_channels) * Order::kQuads;
    for (int i = threadIdx.x; i < count; i += kThreads) shared.coefficients[i] = __ldcg(d.coefficients + first + i);
    __syncthreads();
}

// Writes the outputs of a tile, with the inputs from memory or, if resident, shared memory. The first loads are on
// their way when it calls `wait`, which returns once the group's coefficients are in shared memory.
template <typename Order, bool vectorised, bool is_resident, typename Wait>
__device__ __forceinline__ void apply_tile(const Descriptor &d, int64 group, int64 tile, const Shared &shared,
                                           const Wait &wait) {
    using T = typename Order::Element;
    using Applying = typename Order::template Applying<vectorised>;
    constexpr Source kSource = is_resident ? Source::kShared : Source::kMemory;
    constexpr int kBatch = is_resident ? 1 : Applying::kBatch;
    const TileIterator<T, vectorised> iterator(d, group, tile);
    Pipeline<kSource, Access::kLastUse, kBatch, T, vectorised, Order::kInputs> pipeline(d, iterator, Order::inputs(d),
                                                                                        tile);
    wait();
    const Applying applying(d, iterator, shared.coefficients);
    pipeline.for_each(d, [&](const TileIterator<T, vectorised> &at, const uint4 *packs) {
        applying.write(d, at, packs);
    });
}

}  // namespace bngrad
