// Decode attention: one query token a sequence, read-once over its cache.
#pragma once
#include <cmath>

#include "attention.h"
#include "quantised.h"
#include "vector.h"

// The running softmax of one query head: `sum` and the accumulator are scaled by exp(-max).
struct Softmax {
  float max = -INFINITY;
  float sum = 0.0f;
};

// The state before any token: empty, or what a sink without a value leaves.
inline Softmax initial_softmax(const AttentionArgs& a, int head, bool counts_sink) {
  return a.sinks && counts_sink ? Softmax{a.sinks[head], 1.0f} : Softmax{};
}

// Squeezes scores into (-cap, cap), smoothly.
TM_INLINE void cap_scores(float* scores, int count, float cap) {
  for (int j = 0; j < count; j += kLanes)
    Float32::store(scores + j, tanh_lanes(Float32::load(scores + j) / cap) * cap);
}

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

// scores[g][j] = query[g] . keys[j]; query is [GROUP, dim] in pair order.
template <class T, int GROUP>
TM_INLINE void score_tokens(const float* query, const typename T::Scalar** keys,
                            const typename T::Scalar** values, int count, int vecs,
                            float (*scores)[kChunk]) {
  const int dim = vecs * kLanes;
  const int row_bytes = dim * (int)sizeof(typename T::Scalar);
  Vec sums[GROUP][kLanes];
  for (int g = 0; g < GROUP; g++)
    for (int l = 0; l < kLanes; l++) sums[g][l] = splat(0.0f);
  for (int first = 0; first < count; first += kLanes) {
    const int rest = count - first < kLanes ? count - first : kLanes;
    for (int j = 0; j < rest; j++) {
      const auto* key = keys[first + j];
      for (int z = 0; z < row_bytes; z += 64)
        __builtin_prefetch((const char*)values[first + j] + z);
      Vec even[GROUP], odd[GROUP];
      for (int g = 0; g < GROUP; g++) even[g] = odd[g] = splat(0.0f);
      for (int i = 0; i + 1 < vecs; i += 2) {
        Vec a, b;
        T::load_pair(key + i * kLanes, a, b);
        for (int g = 0; g < GROUP; g++) {
          even[g] += Float32::load(query + g * dim + i * kLanes) * a;
          odd[g] += Float32::load(query + g * dim + (i + 1) * kLanes) * b;
        }
      }
      if (vecs % 2) {
        const Vec a = T::load(key + (vecs - 1) * kLanes);
        for (int g = 0; g < GROUP; g++)
          even[g] += Float32::load(query + g * dim + (vecs - 1) * kLanes) * a;
      }
      for (int g = 0; g < GROUP; g++) sums[g][j] = even[g] + odd[g];
    }
    for (int g = 0; g < GROUP; g++) Float32::store(scores[g] + first, sum_each(sums[g]));
  }
}

// acc[g] = acc[g] * shrink[g] + sum over j of weights[g][j] * values[j]; acc is in pair order.
template <class T, int GROUP>
TM_INLINE void add_values(float (*weights)[kChunk], const float* shrink,
                          const typename T::Scalar** values, int count, int vecs, float* acc) {
  const int dim = vecs * kLanes;
  for (int i = 0; i < vecs; i += 2) {
    const bool pair = i + 1 < vecs;
    Vec low[GROUP], high[GROUP];
    for (int g = 0; g < GROUP; g++) {
      float* at = acc + g * dim + i * kLanes;
      low[g] = Float32::load(at) * shrink[g];
      high[g] = pair ? Float32::load(at + kLanes) * shrink[g] : splat(0.0f);
    }
    for (int j = 0; j < count; j++) {
      Vec a, b = splat(0.0f);
      if (pair)
        T::load_pair(values[j] + i * kLanes, a, b);
      else
        a = T::load(values[j] + i * kLanes);
      for (int g = 0; g < GROUP; g++) {
        low[g] += weights[g][j] * a;
        high[g] += weights[g][j] * b;
      }
    }
    for (int g = 0; g < GROUP; g++) {
      float* at = acc + g * dim + i * kLanes;
      Float32::store(at, low[g]);
      if (pair) Float32::store(at + kLanes, high[g]);
    }
  }
}

// One KV head, `GROUP` of its query heads, tokens [begin, end). `VECS` = head_dim / 8, or 0 where
// it is known only at run time. query, acc: [GROUP, head_dim]; room: see find_rows.
template <class T, int VECS, int GROUP>
void decode_range(const AttentionArgs& a, int seq, int kv_head, const float* query, int begin,
                  int end, float* room, float* acc, Softmax* states) {
  const int vecs = VECS ? VECS : a.head_dim / kLanes;
  const typename T::Scalar *keys[kChunk], *values[kChunk];
  alignas(64) float scores[GROUP][kChunk];
  float shrink[GROUP];
  for (int start = begin; start < end; start += kChunk) {
    const int count = end - start < kChunk ? end - start : kChunk;
    find_rows<T>(a, seq, kv_head, start, 0, count, room, keys, values);
    score_tokens<T, GROUP>(query, keys, values, count, vecs, scores);
    if (a.soft_cap > 0.0f)
      for (int g = 0; g < GROUP; g++) cap_scores(scores[g], count, a.soft_cap);
    for (int g = 0; g < GROUP; g++) shrink[g] = weigh(scores[g], count, states[g]);
    add_values<T, GROUP>(scores, shrink, values, count, vecs, acc);
  }
}

template <class T, int VECS>
void decode_heads(const AttentionArgs& a, int seq, int kv_head, int group, const float* query,
                  int begin, int end, float* room, float* acc, Softmax* states) {
  const int dim = a.head_dim;
  for (int g = 0; g < group; g += 4) {
    const float* q = query + g * dim;
    float* o = acc + g * dim;
    Softmax* s = states + g;
    switch (group - g) {
      case 1: decode_range<T, VECS, 1>(a, seq, kv_head, q, begin, end, room, o, s); break;
      case 2: decode_range<T, VECS, 2>(a, seq, kv_head, q, begin, end, room, o, s); break;
      case 3: decode_range<T, VECS, 3>(a, seq, kv_head, q, begin, end, room, o, s); break;
      default: decode_range<T, VECS, 4>(a, seq, kv_head, q, begin, end, room, o, s); break;
    }
  }
}
