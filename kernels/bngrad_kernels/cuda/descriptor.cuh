// What a kernel is told of a problem and of each piece of work. plan.py decides the cut and says what the words mean;
// tables.py writes these very structures.
#pragma once

namespace bngrad {

typedef long long int64;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxGroupChannels = 256;

// Tensors are (rows, channels, inner), all others of the op's arrays (channels,). An order's kernels know the pointers to
// what it reads and writes; scale may be null for ones.
struct Descriptor {
    const void *grad_x_backprop, *y_backprop, *x;
    const void *grad_scale_backprop, *grad_offset_backprop, *scale, *reserve_space_1, *reserve_space_2;
    void *x_backprop, *scale_backprop, *offset_backprop;  // of the first order
    void *grad_y_backprop, *grad_x, *grad_scale;          // of the second
    double *partials;      // (groups, strips, group_channels, sums)
    float4 *coefficients;  // (groups, group_channels, quads)
    unsigned *arrived;     // (groups,): strips summed so far; zero at the start, and so is the next
    unsigned *ready;       // (groups,): whether the coefficients are there
    int64 rows, channels, inner;
    int64 group_channels, vectors, sweep, chain, tiles, strips, parts;
    int64 row_gap;  // elements from behind a group's last vector of a row to its first of the next
    int64 is_inverse_std, has_bfloat16_stats;
    double epsilon;
};

enum Phase { kSum, kApply, kInfer, kReside };

struct Ticket {
    int descriptor, phase, group, strip;
};

}  // namespace bngrad
