// What a kernel is told about problems and work tiles. plan.py decides the cut and defines the terms; descriptors.py
// writes these structures.
#pragma once

namespace bngrad {

typedef long long int64;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxGroupChannels = 256;

// Tensors have shape (rows, channels, inner), the op's other arrays (channels,). Each order uses the pointers of its
// own inputs and outputs. A null scale stands for ones.
struct Descriptor {
    const void *grad_x_backprop, *y_backprop, *x;
    const void *grad_scale_backprop, *grad_offset_backprop, *scale, *reserve_space_1, *reserve_space_2;
    void *x_backprop, *scale_backprop, *offset_backprop;  // of the first order
    void *grad_y_backprop, *grad_x, *grad_scale;          // of the second
    double *partials;      // (groups, tiles, group_channels, sums)
    float4 *coefficients;  // (groups, group_channels, quads)
    unsigned *arrived;     // (groups,): how many tiles are summed; zero at the start
    unsigned *ready;       // (groups,): whether the coefficients are there
    int64 rows, channels, inner;
    int64 group_channels, vectors, sweep, chain, segments, tiles, parts;
    int64 row_gap;  // elements between the end of a group's last vector in a row and its first vector in the next row
    int64 is_inverse_std, has_bfloat16_stats;
    double epsilon;
};

enum Phase { kSum, kApply, kInfer, kReside };

struct WorkTile {
    int descriptor, phase, group, tile;
};

}  // namespace bngrad
