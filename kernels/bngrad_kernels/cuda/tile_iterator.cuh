// The tile iterator: how the threads of a block go through a tile of a group.
//
// A row of a group is group_channels * inner contiguous elements, cut into `vectors` vectors of kLanes elements. The
// vectors of all rows, row after row, are the group's slots. In each step `sweep` threads take one slot each, then
// move on by `sweep` slots. A sweep is a multiple of `vectors`, so that each lane of a thread stays in one column; a
// group of one channel needs no such rule.
//
// Where 16 bytes can be loaded at once, a vector is kLanes neighbours. Elsewhere its lanes are `vectors` elements
// apart, so that neighbouring threads still load neighbouring elements.
#pragma once

#include "descriptor.cuh"
#include "elements.cuh"

namespace bngrad {

enum class Access { kKeep, kLastUse };  // whether the caches should keep the data

template <Access access, typename Word>
__device__ __forceinline__ Word read(const Word *address) {
    return access == Access::kKeep ? __ldg(address) : __ldcs(address);
}

// A thread's position in a tile.
template <typename T, bool vectorised>
struct TileIterator {
    static constexpr int kLanes = T::kLanes;
    static constexpr int kStride = vectorised ? kLanes : 1;  // elements between the first lanes of two vectors
    using Bits = typename T::Bits;

    int64 index, vector;  // the first lane's element, and its vector in the row
    int64 vectors, columns;
    int64 index_step;
    int steps, vector_step;

    __device__ __forceinline__ TileIterator(const Descriptor &d, int64 group, int64 tile) {
        const int64 first_channel = group * d.group_channels, first = tile * d.tile_slots, rest = d.slots - first;
        vectors = d.vectors;
        columns = min(d.group_channels, d.channels - first_channel) * d.inner;  // the last group may be narrower
        int64 row;
        if (d.tile_rows) {
            const int row_of_sweep = divide(threadIdx.x, d.vectors_reciprocal);
            row = tile * d.tile_rows + row_of_sweep;
            vector = int(threadIdx.x) - row_of_sweep * int(vectors);
        } else {
            const int64 slot = first + threadIdx.x;
            row = d.slots >> 31 ? slot / vectors : int(slot) / int(vectors);  // the first takes much longer
            vector = slot - row * vectors;
        }
        vector_step = int(d.vector_step);
        index = (row * d.channels + first_channel) * d.inner + vector * kStride;
        index_step = d.index_step;
        if (threadIdx.x >= d.sweep || column(0) >= columns || threadIdx.x >= rest) {
            steps = 0;
        } else if (rest >= d.tile_slots) {
            steps = int(d.tile_steps);
        } else {
            steps = (int(rest) - int(threadIdx.x) + int(d.sweep) - 1) / int(d.sweep);
        }
    }

    __device__ __forceinline__ int64 column(int lane) const {
        return vectorised ? vector * kLanes + lane : vector + lane * vectors;
    }

    // Whether a lane holds an element of the group. A vectorised load lies wholly in the group, or its thread is idle.
    __device__ __forceinline__ bool holds(int lane) const { return vectorised || column(lane) < columns; }

    __device__ __forceinline__ void advance(const Descriptor &d) {
        vector += vector_step;
        index += index_step;
        if (vector >= vectors) {  // the next row
            vector -= vectors;
            index += d.row_gap;
        }
    }

    // The address of a vector.
    __device__ __forceinline__ const uint4 *address(const void *tensor) const {
        return reinterpret_cast<const uint4 *>(static_cast<const Bits *>(tensor) + index);
    }

    template <Access access>
    __device__ __forceinline__ uint4 load(const void *tensor) const {
        if constexpr (vectorised) {
            return read<access>(address(tensor));
        } else {
            const Bits *elements = static_cast<const Bits *>(tensor) + index;
            Bits bits[kLanes];
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                bits[lane] = holds(lane) ? read<access>(elements + lane * vectors) : Bits(0);
            }
            return T::gather(bits);
        }
    }

    __device__ __forceinline__ void store(void *tensor, const float *values) const {
        Bits *elements = static_cast<Bits *>(tensor) + index;
        if constexpr (vectorised) {
            __stcs(reinterpret_cast<uint4 *>(elements), T::pack(values));
        } else {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (holds(lane)) __stcs(elements + lane * vectors, T::narrow(values[lane]));
            }
        }
    }

    // The channel of a lane within the group; 0 if the lane holds no element of the group.
    __device__ __forceinline__ int channel(const Descriptor &d, int lane) const {
        return d.group_channels > 1 && column(lane) < columns ? divide(int(column(lane)), d.inner_reciprocal) : 0;
    }
};

}  // namespace bngrad
