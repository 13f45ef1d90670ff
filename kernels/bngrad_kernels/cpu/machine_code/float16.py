"""Conversions of float16 for processors that have none: LLVM calls these functions there, by these names."""

from __future__ import annotations

CONVERSIONS = """
define float @__extendhfsf2(half %h) {
  %bits16 = bitcast half %h to i16
  %bits = zext i16 %bits16 to i32
  %high = and i32 %bits, 32768
  %sign = shl i32 %high, 16
  %magnitude = and i32 %bits, 32767
  %shifted = shl i32 %magnitude, 13
  %normal = add i32 %shifted, 939524096           ; 112 << 23, the difference of the exponents' biases
  %is_nan = icmp ugt i32 %magnitude, 31744
  %quiet = select i1 %is_nan, i32 2143289344, i32 2139095040
  %special = or i32 %shifted, %quiet
  %units = uitofp i32 %magnitude to float
  %subnormal = fmul float %units, 0x3E70000000000000                    ; 2**-24
  %subnormal_bits = bitcast float %subnormal to i32
  %is_special = icmp uge i32 %magnitude, 31744
  %is_subnormal = icmp ult i32 %magnitude, 1024
  %large = select i1 %is_special, i32 %special, i32 %normal
  %any = select i1 %is_subnormal, i32 %subnormal_bits, i32 %large
  %signed = or i32 %any, %sign
  %result = bitcast i32 %signed to float
  ret float %result
}

define half @__truncsfhf2(float %f) {
  %bits = bitcast float %f to i32
  %high = lshr i32 %bits, 16
  %sign = and i32 %high, 32768
  %magnitude = and i32 %bits, 2147483647
  %last = lshr i32 %magnitude, 13
  %odd = and i32 %last, 1
  %up = add i32 %odd, 4095
  %nearest = add i32 %magnitude, %up                                    ; ties to even
  %rebiased = sub i32 %nearest, 939524096
  %normal = lshr i32 %rebiased, 13
  %absolute = bitcast i32 %magnitude to float
  %aligned = fadd float %absolute, 5.0e-1         ; rounds to multiples of 2**-24, the smallest float16
  %aligned_bits = bitcast float %aligned to i32
  %subnormal = sub i32 %aligned_bits, 1056964608
  %payload = and i32 %last, 511
  %nan = or i32 %payload, 32256
  %is_subnormal = icmp ult i32 %magnitude, 947912704                    ; below 2**-14
  %is_infinite = icmp uge i32 %magnitude, 1199566848                    ; from 65520 on
  %is_nan = icmp ugt i32 %magnitude, 2139095040
  %small = select i1 %is_subnormal, i32 %subnormal, i32 %normal
  %finite = select i1 %is_infinite, i32 31744, i32 %small
  %any = select i1 %is_nan, i32 %nan, i32 %finite
  %signed = or i32 %any, %sign
  %bits16 = trunc i32 %signed to i16
  %result = bitcast i16 %bits16 to half
  ret half %result
}
"""
"""In LLVM's language, by operations of integers; they round to nearest, ties to even."""
