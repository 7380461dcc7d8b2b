// Eight float lanes on any CPU, with GCC's and Clang's vector extensions.
#pragma once
#include <cstdint>
#include <cstring>

#define TM_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));
typedef uint32_t UintVec __attribute__((vector_size(32)));
typedef uint16_t HalfVec __attribute__((vector_size(16)));

TM_INLINE Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x}; }

struct Float32 {
  using Scalar = float;
  static TM_INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static TM_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
};

struct BFloat16 {
  using Scalar = uint16_t;
  static TM_INLINE Vec load(const uint16_t* p) {
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    return (Vec)(__builtin_convertvector(half, UintVec) << 16);
  }
  // Rounds to nearest, ties to even; a NaN stays one.
  static TM_INLINE void store(uint16_t* p, Vec v) {
    UintVec bits = (UintVec)v;
    UintVec rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16;
    rounded = (v != v) ? ((bits >> 16) | 0x40) : rounded;
    HalfVec half = __builtin_convertvector(rounded, HalfVec);
    std::memcpy(p, &half, sizeof half);
  }
};

TM_INLINE float sum_lanes(Vec v) {
  float s0 = v[0] + v[4], s1 = v[1] + v[5], s2 = v[2] + v[6], s3 = v[3] + v[7];
  return (s0 + s2) + (s1 + s3);
}

TM_INLINE float max_lanes(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) for x <= 0 to about 1e-7 relative; exactly 0 below -87. Polynomial and split of ln 2
// from the Cephes library's expf.
TM_INLINE Vec exp_nonpositive(Vec x) {
  const Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (clamped * 1.44269504088896341f + magic) - magic;
  const Vec f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x < splat(-87.0f) ? splat(0.0f) : p * (Vec)exponent;
}
