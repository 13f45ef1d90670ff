// Hardware operations that C++ does not express. The tests compile all other files for a CPU: they define BNGRAD_ON_CPU
// and bring their own versions of the PTX functions.
#pragma once

namespace bngrad {

#ifndef BNGRAD_ON_CPU

// Shared memory whose size is set at launch.
__device__ __forceinline__ uint4 *dynamic_shared() {
    extern __shared__ uint4 memory[];
    return memory;
}

__device__ __forceinline__ unsigned load_relaxed(const unsigned *address) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ unsigned load_acquire(const unsigned *address) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned *address, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Returns the previous value. Orders a block's accesses before its preceding barrier against the accesses that another
// block makes behind a barrier after it has read the sum.
__device__ __forceinline__ unsigned add_acq_rel(unsigned *address, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

// Starts to copy 16 bytes from global to shared memory, for the calling thread alone.
__device__ __forceinline__ void copy_async(const uint4 *from, uint4 *to) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
#else
    *to = __ldcs(from);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// Rounds to nearest even; every NaN becomes 0x7fff, as in the instruction below.
__device__ __forceinline__ unsigned round_to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// A float that rounds to the same bfloat16 as the double. Rounding to nearest twice could go wrong at a tie that the first
// rounding makes; here the last bit records that something was cut off.
__device__ __forceinline__ float round_to_odd(double value) {
    const float nearest = float(value);
    const double back = nearest;
    if (back == value || value != value) return nearest;
    const unsigned towards_zero = __float_as_uint(nearest) - (fabs(back) > fabs(value));
    return __uint_as_float(towards_zero | 1u);
}

// Rounds two floats to bfloat16, the first into the lower half.
__device__ __forceinline__ unsigned floats_to_bfloat16s(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return round_to_bfloat16(low) | round_to_bfloat16(high) << 16;
#endif
}

}  // namespace bngrad
