// What a kernel is told of a problem and of each piece of work. plan.py decides the cut and says what the words mean;
// packing.py writes these very structures.
#pragma once

namespace bngrad {

typedef long long int64;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxGroupChannels = 256;
constexpr int kBlocksPerProcessor = 2;

struct Descriptor {
    const void *y_backprop, *x;   // (rows, channels, inner)
    void *x_backprop;             // alike
    const void *scale;            // (channels,), or null for ones; so are the next four, but never null
    const void *mean, *reserve_space_2;
    void *scale_backprop, *offset_backprop;
    double2 *partials;            // (groups, strips, group_channels): sums of dy and of dy * (x - mean)
    float4 *coefficients;         // (groups, group_channels): gain, mean of dy, slope, mean of x
    unsigned *arrived;            // (groups,): strips summed so far; zero at the start, and so is the next
    unsigned *ready;              // (groups,): whether the coefficients are there
    int64 rows, channels, inner;
    int64 group_channels, vectors, sweep, chain, tiles, strips, parts;
    int64 is_training, is_inverse_std, has_bfloat16_stats;
    double epsilon;
};

enum Phase { kSum, kApply, kInfer, kReside };

struct Ticket {
    int descriptor, phase, group, strip;
};

}  // namespace bngrad
