// How the threads of a block go through a strip of a group.
//
// A row of a group is group_channels * inner elements in a run, cut into `vectors` of kLanes elements. The vectors of
// all rows, one row after the other, are the group's slots. `sweep` threads take a slot each and move on by `sweep`
// slots a step. A sweep is a multiple of `vectors`, so that each lane of a thread stays in one column, unless the group
// is one channel, where columns do not matter.
//
// Where 16 bytes may be loaded at once, a vector is kLanes neighbours. Elsewhere its lanes lie `vectors` elements
// apart, so that neighbouring threads still load neighbouring elements.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"

namespace bngrad {

enum class Access { kKeep, kLastUse };  // whether the caches should keep what is read

template <Access access, typename Word>
__device__ __forceinline__ Word read(const Word *address) {
    return access == Access::kKeep ? __ldg(address) : __ldcs(address);
}

// Where a thread is.
struct Place {
    int64 index;     // of the element of the first lane
    unsigned lanes;  // a bit for each lane that is an element of the group
};

template <typename T, bool vectorised>
struct Walk {
    static constexpr int kLanes = T::kLanes;
    static constexpr int kStride = vectorised ? kLanes : 1;  // elements between the first lanes of two vectors
    using Bits = typename T::Bits;

    int64 index, vector;  // of the first lane: its element, and its vector in the row
    int64 vectors, columns;
    int64 index_step;
    int steps, vector_step;

    __device__ __forceinline__ Walk(const Descriptor &d, int64 group, int64 strip) {
        const int64 row_length = d.channels * d.inner, first_channel = group * d.group_channels;
        const int64 slots = d.rows * d.vectors, length = d.tiles * d.chain * d.sweep;
        const int64 first = strip * length + threadIdx.x, end = min(slots, (strip + 1) * length);
        const int64 row = first / d.vectors, row_step = d.sweep / d.vectors;
        vectors = d.vectors;
        columns = min(d.group_channels, d.channels - first_channel) * d.inner;  // the last group may be narrower
        vector = first - row * vectors;
        vector_step = int(d.sweep - row_step * vectors);
        index = row * row_length + first_channel * d.inner + vector * kStride;
        index_step = row_step * row_length + vector_step * kStride;
        const bool takes_part = threadIdx.x < d.sweep && first < end && column(0) < columns;
        steps = takes_part ? int((end - first + d.sweep - 1) / d.sweep) : 0;
    }

    __device__ __forceinline__ int64 column(int lane) const {
        return vectorised ? vector * kLanes + lane : vector + lane * vectors;
    }

    __device__ __forceinline__ Place place() const {
        unsigned lanes = 1;  // a vector in one piece is all in the group, or its thread takes no part
        if constexpr (!vectorised) {
#pragma unroll
            for (int lane = 1; lane < kLanes; ++lane) lanes |= unsigned(column(lane) < columns) << lane;
        }
        return {index, lanes};
    }

    __device__ __forceinline__ void advance(const Descriptor &d) {
        vector += vector_step;
        index += index_step;
        if (vector >= vectors) {  // on to the next row
            vector -= vectors;
            index += d.row_gap;
        }
    }

    template <Access access>
    __device__ __forceinline__ uint4 load(const void *tensor, const Place &at) const {
        const Bits *elements = static_cast<const Bits *>(tensor) + at.index;
        if constexpr (vectorised) {
            return read<access>(reinterpret_cast<const uint4 *>(elements));
        } else {
            Bits bits[kLanes];
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                bits[lane] = at.lanes >> lane & 1 ? read<access>(elements + lane * vectors) : Bits(0);
            }
            return T::gather(bits);
        }
    }

    __device__ __forceinline__ void store(void *tensor, const Place &at, const float *values) const {
        Bits *elements = static_cast<Bits *>(tensor) + at.index;
        if constexpr (vectorised) {
            __stcs(reinterpret_cast<uint4 *>(elements), T::pack(values));
        } else {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (at.lanes >> lane & 1) __stcs(elements + lane * vectors, T::narrow(values[lane]));
            }
        }
    }

    // The channel of a lane within the group; 0 where the lane is none of the group's.
    __device__ __forceinline__ int channel(const Descriptor &d, int lane) const {
        return d.group_channels > 1 && column(lane) < columns ? int(column(lane)) / int(d.inner) : 0;
    }
};

}  // namespace bngrad
