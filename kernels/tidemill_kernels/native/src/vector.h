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

// Cache elements. Rows are read in pairs of vectors, 16 elements, whose order within the pair is
// the type's own: what is loaded in pairs is only combined with and stored as pairs.
struct Float32 {
  using Scalar = float;
  static TM_INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static TM_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  static TM_INLINE void load_pair(const float* p, Vec& a, Vec& b) {
    a = load(p);
    b = load(p + kLanes);
  }
  static TM_INLINE void store_pair(float* p, Vec a, Vec b) {
    store(p, a);
    store(p + kLanes, b);
  }
};

struct BFloat16 {
  using Scalar = uint16_t;
  static TM_INLINE Vec load(const uint16_t* p) {
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    return (Vec)(__builtin_convertvector(half, UintVec) << 16);
  }
  static TM_INLINE void store(uint16_t* p, Vec v) {
    const HalfVec half = __builtin_convertvector(rounded(v) >> 16, HalfVec);
    std::memcpy(p, &half, sizeof half);
  }
  // Even elements, then odd ones (on a little-endian machine): one load and no widening.
  static TM_INLINE void load_pair(const uint16_t* p, Vec& a, Vec& b) {
    UintVec bits;
    std::memcpy(&bits, p, sizeof bits);
    a = (Vec)(bits << 16);
    b = (Vec)(bits & 0xFFFF0000u);
  }
  static TM_INLINE void store_pair(uint16_t* p, Vec a, Vec b) {
    const UintVec bits = (rounded(a) >> 16) | (rounded(b) & 0xFFFF0000u);
    std::memcpy(p, &bits, sizeof bits);
  }

 private:
  // The upper 16 bits hold the nearest bfloat16, ties to even; a NaN stays one.
  static TM_INLINE UintVec rounded(Vec v) {
    const UintVec bits = (UintVec)v;
    const UintVec nearest = bits + (((bits >> 16) & 1) + 0x7FFF);
    return (v != v) ? (bits | 0x400000u) : nearest;
  }
};

// row[dim] = p[dim] * factor, in pair order; a last single vector if dim is not a multiple of 16.
template <class T>
TM_INLINE void load_row(const typename T::Scalar* p, float* row, int dim, float factor) {
  int i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    Vec a, b;
    T::load_pair(p + i, a, b);
    Float32::store_pair(row + i, a * factor, b * factor);
  }
  if (i < dim) Float32::store(row + i, T::load(p + i) * factor);
}

// The inverse of load_row; divides by `divisor`.
template <class T>
TM_INLINE void store_row(typename T::Scalar* p, const float* row, int dim, float divisor) {
  int i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes)
    T::store_pair(p + i, Float32::load(row + i) / divisor,
                  Float32::load(row + i + kLanes) / divisor);
  if (i < dim) T::store(p + i, Float32::load(row + i) / divisor);
}

TM_INLINE float sum_lanes(Vec v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// The sums of eight vectors' lanes, each added in the order of sum_lanes.
TM_INLINE Vec sum_each(const Vec* v) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  Vec pairs[4], quads[2];
  for (int i = 0; i < 4; i++)
    pairs[i] = TM_SHUFFLE(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               TM_SHUFFLE(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  for (int i = 0; i < 2; i++)
    quads[i] = TM_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               TM_SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return TM_SHUFFLE(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         TM_SHUFFLE(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
#undef TM_SHUFFLE
#define TM_HAS_SUM_EACH
#endif
#endif
#ifndef TM_HAS_SUM_EACH
  Vec sums;
  for (int i = 0; i < kLanes; i++) sums[i] = sum_lanes(v[i]);
  return sums;
#endif
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

// tanh(x) to about 1e-7 relative; the polynomial for small x is that of the Cephes library's tanhf.
TM_INLINE Vec tanh_lanes(Vec x) {
  const Vec size = x < splat(0.0f) ? -x : x;
  const Vec z = x * x;
  Vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Vec e = exp_nonpositive(size * -2.0f);
  const Vec large = (1.0f - e) / (1.0f + e);
  const Vec signed_large = x < splat(0.0f) ? -large : large;
  return size < splat(0.625f) ? p * z * x + x : signed_large;
}
