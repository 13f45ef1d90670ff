// The element types: conversion of 16 bytes of elements to floats and back. Widening is exact, narrowing rounds to
// nearest even. CUDA's own types are not used, so that the compiler needs no headers but these.
#pragma once

#include "primitives.cuh"

namespace bngrad {

struct Float32 {
    using Bits = unsigned;
    static constexpr int kLanes = 4;

    static __device__ __forceinline__ void unpack(const uint4 &pack, float *values) {
        values[0] = __uint_as_float(pack.x);
        values[1] = __uint_as_float(pack.y);
        values[2] = __uint_as_float(pack.z);
        values[3] = __uint_as_float(pack.w);
    }
    static __device__ __forceinline__ uint4 pack(const float *values) {
        return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                          __float_as_uint(values[3]));
    }
    static __device__ __forceinline__ uint4 gather(const Bits *bits) {
        return make_uint4(bits[0], bits[1], bits[2], bits[3]);
    }
    static __device__ __forceinline__ float widen(Bits bits) { return __uint_as_float(bits); }
    static __device__ __forceinline__ Bits narrow(float value) { return __float_as_uint(value); }
};

// The common part of the 16-bit types; Pair widens and narrows two elements at a time.
template <typename Pair>
struct Narrow {
    using Bits = unsigned short;
    static constexpr int kLanes = 8;

    static __device__ __forceinline__ void unpack(const uint4 &pack, float *values) {
        Pair::widen(pack.x, values);
        Pair::widen(pack.y, values + 2);
        Pair::widen(pack.z, values + 4);
        Pair::widen(pack.w, values + 6);
    }
    static __device__ __forceinline__ uint4 pack(const float *values) {
        return make_uint4(Pair::narrow(values[0], values[1]), Pair::narrow(values[2], values[3]),
                          Pair::narrow(values[4], values[5]), Pair::narrow(values[6], values[7]));
    }
    static __device__ __forceinline__ uint4 gather(const Bits *bits) {
        return make_uint4(bits[0] | unsigned(bits[1]) << 16, bits[2] | unsigned(bits[3]) << 16,
                          bits[4] | unsigned(bits[5]) << 16, bits[6] | unsigned(bits[7]) << 16);
    }
    static __device__ __forceinline__ float widen(Bits bits) {
        float values[2];
        Pair::widen(bits, values);
        return values[0];
    }
    static __device__ __forceinline__ Bits narrow(float value) { return Bits(Pair::narrow(value, 0.f)); }
};

struct Float16Pair {
    static __device__ __forceinline__ void widen(unsigned word, float *values) {
        values[0] = half_to_float((unsigned short)(word));
        values[1] = half_to_float((unsigned short)(word >> 16));
    }
    static __device__ __forceinline__ unsigned narrow(float low, float high) {
        return float_to_half(low) | unsigned(float_to_half(high)) << 16;
    }
};

struct BFloat16Pair {
    static __device__ __forceinline__ void widen(unsigned word, float *values) {
        values[0] = __uint_as_float(word << 16);
        values[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ unsigned narrow(float low, float high) { return floats_to_bfloat16s(low, high); }
};

using Float16 = Narrow<Float16Pair>;
using BFloat16 = Narrow<BFloat16Pair>;

}  // namespace bngrad
