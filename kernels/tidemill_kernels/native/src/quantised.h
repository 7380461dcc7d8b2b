// Caches of 8 bits: each head of a token is a row of codes with a float32 scale.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "vector.h"

typedef int8_t Int8Codes __attribute__((vector_size(8)));
typedef int16_t ShortCodes __attribute__((vector_size(16)));
typedef uint8_t ByteCodes __attribute__((vector_size(8)));

TM_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

TM_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Adding it and subtracting it again rounds to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

struct Int8 {
  static constexpr float kLargest = 127.0f;
  static TM_INLINE uint8_t encode(float x) {
    return (uint8_t)(int8_t)(int32_t)((x + kRounder) - kRounder);
  }
  static TM_INLINE Vec decode(const uint8_t* p) {
    Int8Codes codes;
    std::memcpy(&codes, p, sizeof codes);
    // Step by step, for which compilers have instructions.
    const ShortCodes wider = __builtin_convertvector(codes, ShortCodes);
    return __builtin_convertvector(__builtin_convertvector(wider, IntVec), Vec);
  }
};

// Floats of 8 bits with MANTISSA bits of fraction; an exponent of 0 stands for 2^(1 - BIAS) and
// no leading one. Numbers beyond the largest, which scaling rules out, are not looked after.
template <int MANTISSA, int BIAS>
struct Float8 {
  static constexpr int kCut = 23 - MANTISSA;
  static constexpr uint32_t kShift = (uint32_t)(127 - BIAS) << 23;
  static constexpr uint32_t kSmallestNormal = kShift + (1u << 23);

  static TM_INLINE uint8_t encode(float x) {
    const uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFFu;
    const uint32_t nearest = size + ((1u << (kCut - 1)) - 1) + ((size >> kCut) & 1);
    const uint32_t normal = (nearest - kShift) >> kCut;
    // Below that the code counts steps.
    const uint32_t bounded = size < kSmallestNormal ? size : kSmallestNormal;
    const float steps = float_of(bounded) * (float)(1 << (BIAS - 1 + MANTISSA));
    const uint32_t small = (uint32_t)(int32_t)((steps + kRounder) - kRounder);
    return (uint8_t)((size < kSmallestNormal ? small : normal) | (bits >> 24 & 0x80u));
  }
  static TM_INLINE Vec decode(const uint8_t* p) {
    ByteCodes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const HalfVec wider = __builtin_convertvector(bytes, HalfVec);
    const UintVec codes = __builtin_convertvector(wider, UintVec);
    const UintVec size = (codes & 0x7Fu) << kCut;
    // A subnormal with a leading one in its place, which is taken away again.
    const Vec small = (Vec)(size + kSmallestNormal) - float_of(kSmallestNormal);
    const Vec magnitude = size < (1u << 23) ? small : (Vec)(size + kShift);
    return (Vec)((UintVec)magnitude | ((codes & 0x80u) << 24));
  }
};

struct E4M3 : Float8<3, 7> {
  static constexpr float kLargest = 448.0f;
};
struct E5M2 : Float8<2, 15> {
  static constexpr float kLargest = 57344.0f;
};

// bfloat16 whose pairs are in the order of the elements, as those of Float32.
struct OrderedBFloat16 : BFloat16 {
  static TM_INLINE void load_pair(const uint16_t* p, Vec& a, Vec& b) {
    a = load(p);
    b = load(p + kLanes);
  }
  static TM_INLINE void store_pair(uint16_t* p, Vec a, Vec b) {
    store(p, a);
    store(p + kLanes, b);
  }
};

template <class F>
TM_INLINE void decode_row(const uint8_t* codes, float scale, float* row, int dim) {
  for (int i = 0; i < dim; i += kLanes) Float32::store(row + i, F::decode(codes + i) * scale);
}

// Decodes tokens [begin + skipped, begin + count) into `room`, [2, kChunk, head_dim] floats, and
// points to them.
template <class F>
void decode_chunk(const AttentionArgs& a, int seq, int kv_head, int begin, int skipped, int count,
                  float* room, const float** keys, const float** values) {
  const int32_t* table = a.block_tables + (int64_t)seq * a.max_blocks;
  const int dim = a.head_dim;
  for (int j = 0; j < count; j++) {
    keys[j] = room + j * dim;
    values[j] = room + (kChunk + j) * dim;
    if (j < skipped) continue;
    const int64_t block = table[(begin + j) / a.block_size];
    const int offset = (begin + j) % a.block_size;
    const int64_t at = block * a.block_stride + kv_head * a.head_stride + offset * a.slot_stride;
    const int64_t scale = (block * a.kv_heads + kv_head) * a.block_size + offset;
    decode_row<F>((const uint8_t*)a.key_cache + at, a.key_scales[scale], room + j * dim, dim);
    decode_row<F>((const uint8_t*)a.value_cache + at, a.value_scales[scale],
                  room + (kChunk + j) * dim, dim);
  }
}

// Where the rows of `count` tokens are: in the cache, or, of a quantised one, decoded in `room`.
template <class K>
TM_INLINE void find_rows(const AttentionArgs& a, int seq, int kv_head, int begin, int skipped,
                         int count, float* room, const typename K::Scalar** keys,
                         const typename K::Scalar** values) {
  if constexpr (std::is_same<K, Float32>::value) {
    switch (a.kv_format) {
      case kInt8:
        return decode_chunk<Int8>(a, seq, kv_head, begin, skipped, count, room, keys, values);
      case kE4M3:
        return decode_chunk<E4M3>(a, seq, kv_head, begin, skipped, count, room, keys, values);
      case kE5M2:
        return decode_chunk<E5M2>(a, seq, kv_head, begin, skipped, count, room, keys, values);
    }
  }
  cached_rows<K>(a, seq, kv_head, begin, count, keys, values);
}

// Floats that `find_rows` needs room for.
inline int64_t room_for_rows(const AttentionArgs& a) {
  return a.kv_format ? 2 * (int64_t)kChunk * a.head_dim : 0;
}

TM_INLINE float wide(float x) { return x; }
TM_INLINE float wide(uint16_t bfloat16) { return float_of((uint32_t)bfloat16 << 16); }

// Writes the codes of a row and returns its scale; rules of `quantise_rows` in kv_scales.py.
template <class Scalar, class F>
inline float encode_row(const Scalar* row, uint8_t* codes, int dim) {
  uint32_t largest = 0;  // sizes of floats are ordered as their bits
  for (int i = 0; i < dim; i++) {
    const uint32_t size = bits_of(wide(row[i])) & 0x7FFFFFFFu;
    largest = size > largest ? size : largest;
  }
  if (largest >= 0x7F800000u) {
    std::memset(codes, 0, dim);
    return NAN;
  }
  const float scale = float_of(largest) < 0x1p-100f ? 0.0f : float_of(largest) / F::kLargest;
  const float divisor = scale == 0.0f ? 1.0f : scale;
  for (int i = 0; i < dim; i++) codes[i] = F::encode(wide(row[i]) / divisor);
  return scale;
}
