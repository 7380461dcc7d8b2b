// Entry points that store keys and values. Return 0, or 1 + the index of the first token whose
// slot is beyond the cache; nothing is written then.
#include <cstdint>
#include <cstring>

#include "quantised.h"

namespace {

int64_t check_slots(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
  for (int64_t t = 0; t < num_tokens; t++)
    if (slots[t] >= num_slots) return t + 1;
  return 0;
}

// A parallel region costs more than copying a few rows.
int useful_threads(int64_t num_bytes, int num_threads) {
  return num_bytes < 65536 ? 1 : num_threads;
}

}  // namespace

struct CacheWriteArgs {
  const char* key;
  const char* value;
  char* key_cache;
  char* value_cache;
  const int64_t* slot_mapping;
  int64_t key_token_stride, key_head_stride;  // every stride counts bytes
  int64_t value_token_stride, value_head_stride;
  int64_t block_stride, head_stride, slot_stride;
  int64_t num_tokens, num_slots;
  int32_t block_size, kv_heads, row_bytes, num_threads;
};

extern "C" int64_t tidemill_reshape_and_cache(const CacheWriteArgs* args) {
  const CacheWriteArgs& a = *args;
  const int64_t bad = check_slots(a.slot_mapping, a.num_tokens, a.num_slots);
  if (bad) return bad;
  const int threads = useful_threads(a.num_tokens * a.kv_heads * a.row_bytes, a.num_threads);
#pragma omp parallel for num_threads(threads)
  for (int64_t t = 0; t < a.num_tokens; t++) {
    const int64_t slot = a.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t at = slot / a.block_size * a.block_stride + slot % a.block_size * a.slot_stride;
    for (int h = 0; h < a.kv_heads; h++) {
      std::memcpy(a.key_cache + at + h * a.head_stride,
                  a.key + t * a.key_token_stride + h * a.key_head_stride, a.row_bytes);
      std::memcpy(a.value_cache + at + h * a.head_stride,
                  a.value + t * a.value_token_stride + h * a.value_head_stride, a.row_bytes);
    }
  }
  return 0;
}

struct QuantisedWriteArgs {
  const void* key;
  const void* value;
  uint8_t* key_cache;
  uint8_t* value_cache;
  float* key_scales;  // [num_blocks, kv_heads, block_size]
  float* value_scales;
  const int64_t* slot_mapping;
  int64_t key_token_stride, key_head_stride;  // every stride counts elements
  int64_t value_token_stride, value_head_stride;
  int64_t block_stride, head_stride, slot_stride;
  int64_t num_tokens, num_slots;
  int32_t block_size, kv_heads, head_dim;
  int32_t kv_format, is_bfloat16, num_threads;
};

namespace {

template <class Scalar, class F>
void quantise(const QuantisedWriteArgs& a) {
  const int64_t num_bytes = a.num_tokens * a.kv_heads * a.head_dim;
  const int threads = useful_threads(num_bytes, a.num_threads);
#pragma omp parallel for num_threads(threads)
  for (int64_t t = 0; t < a.num_tokens; t++) {
    const int64_t slot = a.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    for (int h = 0; h < a.kv_heads; h++) {
      const int64_t at = block * a.block_stride + h * a.head_stride + offset * a.slot_stride;
      const int64_t scale = (block * a.kv_heads + h) * a.block_size + offset;
      const auto* key = (const Scalar*)a.key + t * a.key_token_stride + h * a.key_head_stride;
      const auto* value =
          (const Scalar*)a.value + t * a.value_token_stride + h * a.value_head_stride;
      a.key_scales[scale] = encode_row<Scalar, F>(key, a.key_cache + at, a.head_dim);
      a.value_scales[scale] = encode_row<Scalar, F>(value, a.value_cache + at, a.head_dim);
    }
  }
}

template <class Scalar>
void quantise_as(const QuantisedWriteArgs& a) {
  switch (a.kv_format) {
    case kInt8: return quantise<Scalar, Int8>(a);
    case kE4M3: return quantise<Scalar, E4M3>(a);
    default: return quantise<Scalar, E5M2>(a);
  }
}

}  // namespace

extern "C" int64_t tidemill_quantise_and_cache(const QuantisedWriteArgs* args) {
  const int64_t bad = check_slots(args->slot_mapping, args->num_tokens, args->num_slots);
  if (bad) return bad;
  args->is_bfloat16 ? quantise_as<uint16_t>(*args) : quantise_as<float>(*args);
  return 0;
}
