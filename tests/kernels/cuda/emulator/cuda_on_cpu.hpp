// As much of CUDA as the kernels use, for a CPU.
//
// A block runs on one OS thread, its CUDA threads as fibers that take turns at barriers; several OS threads run
// several blocks. Compiled for ThreadSanitizer, each CUDA thread is a thread to it, and nothing but barriers, and
// atomic operations that acquire or release, orders what these do: it sees every access that the kernels leave without
// an order, in the shared memory of a block and in the memory of the device.
//
// Barriers are exact: a __syncthreads that some thread of the block does not reach, or a shuffle that some thread of
// the warp does not take part in, ends the process. What a CPU cannot show: anything of speed.
#pragma once

#define BNGRAD_ON_CPU
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

struct uint4 { unsigned x, y, z, w; };

#include "fibers.hpp"

struct float4 { float x, y, z, w; };
struct double2 { double x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename Number>
inline Number min(Number a, Number b) { return b < a ? b : a; }
using std::sqrt;

inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

template <typename Word> inline Word __ldg(const Word *address) { return *address; }
template <typename Word> inline Word __ldcs(const Word *address) { return *address; }
template <typename Word> inline Word __ldcg(const Word *address) { return *address; }
template <typename Word> inline void __stcs(Word *address, Word value) { *address = value; }

inline unsigned add(unsigned *address, unsigned value, int order) {
    const unsigned before = __atomic_fetch_add(address, value, order);
    std::this_thread::yield();  // to other blocks, which would hardly come in between
    return before;
}
inline unsigned atomicAdd(unsigned *address, unsigned value) { return add(address, value, __ATOMIC_RELAXED); }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline double __shfl_xor_sync(unsigned, double value, int mask) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, 8);
    bits = exchange(bits, mask);
    std::memcpy(&value, &bits, 8);
    return value;
}

namespace bngrad {

inline unsigned load_relaxed(const unsigned *address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
inline unsigned load_acquire(const unsigned *address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
inline void store_release(unsigned *address, unsigned value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
inline unsigned add_acq_rel(unsigned *address, unsigned value) { return add(address, value, __ATOMIC_ACQ_REL); }
inline void copy_async(const uint4 *from, uint4 *to) { *to = *from; }
inline void wait_for_copies() {}
inline float half_to_float(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return float(half);
}
inline unsigned short float_to_half(float value) {
    const _Float16 half = _Float16(value);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

}  // namespace bngrad
