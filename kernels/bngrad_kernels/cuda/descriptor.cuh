// What a kernel is told about problems and work tiles. plan.py decides the cut and defines the terms; descriptors.py
// writes these structures.
#pragma once

namespace bngrad {

typedef long long int64;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxGroupChannels = 256;
constexpr int kSectionTiles = 32;

// Tensors have shape (rows, channels, inner), the op's other arrays (channels,). Each order uses the pointers of its
// own inputs and outputs. A null scale stands for ones.
struct Descriptor {
    const void *grad_x_backprop, *y_backprop, *x;
    const void *grad_scale_backprop, *grad_offset_backprop, *scale, *reserve_space_1, *reserve_space_2;
    void *x_backprop, *scale_backprop, *offset_backprop;  // of the first order
    void *grad_y_backprop, *grad_x, *grad_scale;          // of the second
    double *partials;      // (groups, tiles + sections, group_channels, sums)
    float4 *coefficients;  // (groups, group_channels, quads)
    unsigned *arrived;     // (groups, sections + 1): how many tiles of each section, and sections; zero at first
    unsigned *ready;       // (groups,): whether the coefficients are there
    int64 rows, channels, inner;
    int64 group_channels, vectors, sweep, tiles, parts, sections;
    int64 row_gap;  // elements between the end of a group's last vector in a row and its first vector in the next row
    int64 slots;                               // of a group: rows * vectors
    int64 tile_slots, tile_steps, tile_rows;   // of a whole tile; no rows in a group of one channel
    int64 row_step, vector_step, index_step;   // how far a sweep goes, in rows, vectors and elements
    int64 parts_shift;                         // the binary logarithm of parts
    int64 inner_reciprocal, vectors_reciprocal;  // for `divide`
    int64 is_inverse_std, has_bfloat16_stats;
    double epsilon;
};

// n / d for n < 2048 and d < 512, by the reciprocal of d that descriptors.py gives; a division takes much longer.
constexpr int kReciprocalBits = 20;

__device__ __forceinline__ int divide(int n, int64 reciprocal) {
    return int(unsigned(n) * unsigned(reciprocal) >> kReciprocalBits);
}

enum Phase { kSum, kApply, kInfer, kReside };

struct WorkTile {
    int descriptor, phase, group, tile;
};

}  // namespace bngrad
