// Decode attention: one query token a sequence, read-once over its cache.
#pragma once
#include <cmath>

#include "attention.h"
#include "vector.h"

// The running softmax of one query head: `sum` and the accumulator are scaled by exp(-max).
struct Softmax {
  float max = -INFINITY;
  float sum = 0.0f;
};

// Turns `count` scores into weights; returns the factor by which older sums must shrink.
TM_INLINE float weigh(float* scores, int count, Softmax& state) {
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int j = count; j < padded; j++) scores[j] = -INFINITY;
  Vec top = splat(state.max);
  for (int j = 0; j < padded; j += kLanes) {
    const Vec x = Float32::load(scores + j);
    top = x > top ? x : top;
  }
  const float max = max_lanes(top);
  Vec total = splat(0.0f);
  for (int j = 0; j < padded; j += kLanes) {
    const Vec p = exp_nonpositive(Float32::load(scores + j) - max);
    total += p;
    Float32::store(scores + j, p);
  }
  const float shrink = std::exp(state.max - max);
  state.sum = state.sum * shrink + sum_lanes(total);
  state.max = max;
  return shrink;
}

// One KV head, `GROUP` of its query heads, tokens [begin, end). `VECS` = head_dim / 8, or 0 where
// it is known only at run time. acc: [GROUP, head_dim].
template <class T, int VECS, int GROUP>
void decode_range(const AttentionArgs& a, int seq, int kv_head, const float* query, int begin,
                  int end, float* acc, Softmax* states) {
  const int vecs = VECS ? VECS : a.head_dim / kLanes;
  const int dim = vecs * kLanes;
  const typename T::Scalar *keys[kChunk], *values[kChunk];
  alignas(64) float scores[GROUP][kChunk];
  for (int start = begin; start < end; start += kChunk) {
    const int count = end - start < kChunk ? end - start : kChunk;
    cached_rows<T>(a, seq, kv_head, start, count, keys, values);
    for (int j = 0; j < count; j++) {
      const char* value = (const char*)values[j];
      for (int z = 0; z < dim * (int)sizeof(typename T::Scalar); z += 64)
        __builtin_prefetch(value + z);
      Vec sums[GROUP];
      for (int g = 0; g < GROUP; g++) sums[g] = splat(0.0f);
      for (int i = 0; i < vecs; i++) {
        const Vec k = T::load(keys[j] + i * kLanes);
        for (int g = 0; g < GROUP; g++) sums[g] += Float32::load(query + g * dim + i * kLanes) * k;
      }
      for (int g = 0; g < GROUP; g++) scores[g][j] = sum_lanes(sums[g]);
    }
    float shrink[GROUP];
    for (int g = 0; g < GROUP; g++) shrink[g] = weigh(scores[g], count, states[g]);
    for (int i = 0; i < vecs; i += 2) {
      const bool pair = i + 1 < vecs;
      Vec low[GROUP], high[GROUP];
      for (int g = 0; g < GROUP; g++) {
        low[g] = Float32::load(acc + g * dim + i * kLanes) * shrink[g];
        high[g] = pair ? Float32::load(acc + g * dim + (i + 1) * kLanes) * shrink[g] : splat(0.0f);
      }
      for (int j = 0; j < count; j++) {
        const Vec v = T::load(values[j] + i * kLanes);
        const Vec w = pair ? T::load(values[j] + (i + 1) * kLanes) : splat(0.0f);
        for (int g = 0; g < GROUP; g++) {
          low[g] += scores[g][j] * v;
          high[g] += scores[g][j] * w;
        }
      }
      for (int g = 0; g < GROUP; g++) {
        Float32::store(acc + g * dim + i * kLanes, low[g]);
        if (pair) Float32::store(acc + g * dim + (i + 1) * kLanes, high[g]);
      }
    }
  }
}

template <class T, int VECS>
void decode_heads(const AttentionArgs& a, int seq, int kv_head, int group, const float* query,
                  int begin, int end, float* acc, Softmax* states) {
  const int dim = a.head_dim;
  for (int g = 0; g < group; g += 4) {
    const float* q = query + g * dim;
    float* o = acc + g * dim;
    switch (group - g) {
      case 1: decode_range<T, VECS, 1>(a, seq, kv_head, q, begin, end, o, states + g); break;
      case 2: decode_range<T, VECS, 2>(a, seq, kv_head, q, begin, end, o, states + g); break;
      case 3: decode_range<T, VECS, 3>(a, seq, kv_head, q, begin, end, o, states + g); break;
      default: decode_range<T, VECS, 4>(a, seq, kv_head, q, begin, end, o, states + g); break;
    }
  }
}
