// What one paged attention call is given; mirrored by `AttentionArgs` in attention.py.
#pragma once
#include <cstdint>

// What the cache holds: the dtype of the query, or codes with scales.
enum KVFormat : int32_t { kPlain = 0, kInt8 = 1, kE4M3 = 2, kE5M2 = 3 };

struct AttentionArgs {
  void* out;
  const void* query;
  const void* key_cache;  // [num_blocks, kv_heads, block_size, head_dim]
  const void* value_cache;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  const float* sinks;  // [num_heads], or null
  const float* key_scales;  // [num_blocks, kv_heads, block_size], or null
  const float* value_scales;
  int64_t out_token_stride, out_head_stride;  // every stride counts elements
  int64_t query_token_stride, query_head_stride;
  int64_t block_stride, head_stride, slot_stride;
  int32_t num_blocks, max_blocks, block_size;
  int32_t num_heads, kv_heads, head_dim;
  int32_t num_decodes, num_seqs;
  int32_t is_bfloat16, num_threads;  // the former of query and out, and of a plain cache
  int32_t kv_format;
  int32_t window;  // a query at p sees the keys from p - window + 1 on; 0: all
  float scale, soft_cap;
};

// The first position that a query at `position` sees.
inline int first_visible(const AttentionArgs& a, int position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}

// Tokens whose addresses and scores are worked on at once.
constexpr int kChunk = 64;
// Tokens of a sequence that one thread takes in a decode. A constant, so that a token's rounding
// depends neither on the number of threads nor on the other sequences of the step.
constexpr int kSplit = 512;

template <class T>
inline int cached_rows(const AttentionArgs& a, int seq, int kv_head, int begin, int count,
                       const typename T::Scalar** keys, const typename T::Scalar** values) {
  using Scalar = typename T::Scalar;
  const int32_t* table = a.block_tables + (int64_t)seq * a.max_blocks;
  const Scalar* key_base = (const Scalar*)a.key_cache + kv_head * a.head_stride;
  const Scalar* value_base = (const Scalar*)a.value_cache + kv_head * a.head_stride;
  int index = begin / a.block_size, offset = begin % a.block_size;
  for (int j = 0; j < count; j++) {
    const int32_t block = table[index];
    const int64_t at = block * a.block_stride + offset * a.slot_stride;
    keys[j] = key_base + at;
    values[j] = value_base + at;
    if (++offset == a.block_size) offset = 0, index++;
  }
  return count;
}
