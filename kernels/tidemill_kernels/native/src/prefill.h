// Prefill attention: tiles of query tokens against chunks of the cache, as two small matrix
// products around an online softmax.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"
#include "decode.h"
#include "quantised.h"
#include "vector.h"

// Query rows (tokens x heads of one KV head) that share one pass over the cache.
constexpr int kTileRows = 64;

// c[ROWS, width] += a[ROWS, depth] @ b[depth, width]; rows of a and c are a_stride and c_stride
// apart, width is COLUMNS vectors.
template <int ROWS, int COLUMNS>
TM_INLINE void multiply_add(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            float* c, int64_t c_stride, int depth) {
  Vec sums[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < COLUMNS; v++) sums[r][v] = Float32::load(c + r * c_stride + v * kLanes);
  for (int k = 0; k < depth; k++) {
    Vec row[COLUMNS];
    for (int v = 0; v < COLUMNS; v++) row[v] = Float32::load(b + k * b_stride + v * kLanes);
    for (int r = 0; r < ROWS; r++) {
      const Vec x = splat(a[r * a_stride + k]);
      for (int v = 0; v < COLUMNS; v++) sums[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < COLUMNS; v++) Float32::store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <int ROWS>
inline void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          float* c, int64_t c_stride, int depth, int vecs) {
  int v = 0;
  for (; v + 2 <= vecs; v += 2)
    multiply_add<ROWS, 2>(a, a_stride, b + v * kLanes, b_stride, c + v * kLanes, c_stride, depth);
  if (v < vecs)
    multiply_add<ROWS, 1>(a, a_stride, b + v * kLanes, b_stride, c + v * kLanes, c_stride, depth);
}

// c[rows, vecs * 8] += a[rows, depth] @ b[depth, vecs * 8]
inline void matmul(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                   int64_t c_stride, int rows, int depth, int vecs) {
  int r = 0;
  for (; r + 6 <= rows; r += 6, a += 6 * a_stride, c += 6 * c_stride)
    multiply_rows<6>(a, a_stride, b, b_stride, c, c_stride, depth, vecs);
  for (; r + 2 <= rows; r += 2, a += 2 * a_stride, c += 2 * c_stride)
    multiply_rows<2>(a, a_stride, b, b_stride, c, c_stride, depth, vecs);
  if (r < rows) multiply_rows<1>(a, a_stride, b, b_stride, c, c_stride, depth, vecs);
}

// One thread's buffers, allocated once per call.
struct PrefillScratch {
  std::vector<float> query, acc, keys, values, scores, row, room;
  std::vector<Softmax> states;
  PrefillScratch(int rows, int dim, int64_t room_size)
      : query(rows * dim), acc(rows * dim), keys(dim * kChunk), values(kChunk * dim),
        scores(rows * kChunk), row(dim), room(room_size), states(rows) {}
};

// Keys go in transposed, [dim, kChunk], values as they are. The first `skipped` tokens are not
// read; they and unused columns are zero.
template <class T>
void load_chunk(const AttentionArgs& a, int seq, int kv_head, int begin, int skipped, int count,
                PrefillScratch& s) {
  const typename T::Scalar *keys[kChunk], *values[kChunk];
  const int dim = a.head_dim;
  find_rows<T>(a, seq, kv_head, begin, skipped, count, s.room.data(), keys, values);
  for (int j = 0; j < skipped; j++) {
    for (int i = 0; i < dim; i++) s.keys[i * kChunk + j] = 0.0f;
    std::memset(&s.values[j * dim], 0, sizeof(float) * dim);
  }
  for (int j = skipped; j < count; j++) {
    load_row<T>(keys[j], s.row.data(), dim, 1.0f);
    for (int i = 0; i < dim; i++) s.keys[i * kChunk + j] = s.row[i];
    load_row<T>(values[j], &s.values[j * dim], dim, 1.0f);
  }
  for (int j = count; j < kChunk; j++)
    for (int i = 0; i < dim; i++) s.keys[i * kChunk + j] = 0.0f;
}

// Query tokens [first, first + tokens) of a sequence under one KV head; row = token * group + head.
// Q is the type of query and out, T that of the cache's rows; both order their pairs alike.
template <class Q, class T>
void prefill_tile(const AttentionArgs& a, int seq, int kv_head, int first, int tokens,
                  PrefillScratch& s) {
  const int group = a.num_heads / a.kv_heads, dim = a.head_dim, rows = tokens * group;
  const int start = a.cu_seqlens_q[seq];
  const int position = a.seq_lens[seq] - (a.cu_seqlens_q[seq + 1] - start) + first;
  for (int r = 0; r < rows; r++) {
    const auto* q = (const typename Q::Scalar*)a.query +
                    (int64_t)(start + first + r / group) * a.query_token_stride +
                    (kv_head * group + r % group) * a.query_head_stride;
    load_row<Q>(q, &s.query[r * dim], dim, a.scale);
    std::memset(&s.acc[r * dim], 0, sizeof(float) * dim);
    s.states[r] = initial_softmax(a, kv_head * group + r % group, true);
  }
  const int end = position + tokens;
  const int first_token = first_visible(a, position);
  // Chunks start at multiples of kChunk, so that rounding does not depend on the tile.
  for (int begin = first_token / kChunk * kChunk; begin < end; begin += kChunk) {
    const int count = end - begin < kChunk ? end - begin : kChunk;
    const int skipped = first_token > begin ? first_token - begin : 0;
    load_chunk<T>(a, seq, kv_head, begin, skipped, count, s);
    // Rows whose token comes before this chunk see nothing of it.
    const int hidden = begin > position ? (begin - position) * group : 0;
    // Nor do those whose window starts after it.
    const int last = a.window ? begin + count + a.window - 1 - position : tokens;
    const int active = (last < tokens ? last : tokens) * group - hidden;
    float* scores = &s.scores[hidden * kChunk];
    float* acc = &s.acc[hidden * dim];
    std::memset(scores, 0, sizeof(float) * active * kChunk);
    matmul(&s.query[hidden * dim], dim, s.keys.data(), kChunk, scores, kChunk, active, dim,
           (count + kLanes - 1) / kLanes);
    for (int r = 0; r < active; r++) {
      const int visible = position + (hidden + r) / group + 1 - begin;
      const int seen = visible < count ? visible : count;
      float* row = scores + r * kChunk;
      if (a.soft_cap > 0.0f) cap_scores(row, seen, a.soft_cap);
      const int unseen = first_visible(a, position + (hidden + r) / group) - begin;
      for (int j = 0; j < unseen; j++) row[j] = -INFINITY;
      const float shrink = weigh(row, seen, s.states[hidden + r]);
      for (int j = seen; j < count; j++) row[j] = 0.0f;
      if (shrink != 1.0f)
        for (int i = 0; i < dim; i += kLanes)
          Float32::store(acc + r * dim + i, Float32::load(acc + r * dim + i) * shrink);
    }
    matmul(scores, kChunk, s.values.data(), dim, acc, dim, active, count, dim / kLanes);
  }
  auto* first_out = (typename Q::Scalar*)a.out + (int64_t)(start + first) * a.out_token_stride;
  for (int r = 0; r < rows; r++) {
    auto* out = first_out + r / group * a.out_token_stride +
                (kv_head * group + r % group) * a.out_head_stride;
    store_row<Q>(out, &s.acc[r * dim], dim, s.states[r].sum);
  }
}

template <class Q, class T>
void prefill(const AttentionArgs& a) {
  struct Tile {
    int32_t seq, kv_head, first, tokens;
  };
  const int group = a.num_heads / a.kv_heads;
  const int size = kTileRows / group > 0 ? kTileRows / group : 1;
  std::vector<Tile> tiles;
  for (int seq = a.num_decodes; seq < a.num_seqs; seq++) {
    const int length = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
    for (int first = (length - 1) / size * size; first >= 0; first -= size)  // longest first
      for (int head = 0; head < a.kv_heads; head++)
        tiles.push_back({seq, head, first, length - first < size ? length - first : size});
  }
  const int64_t count = (int64_t)tiles.size();
  const int threads = count < a.num_threads ? (int)count : a.num_threads;
#pragma omp parallel num_threads(threads)
  {
    PrefillScratch scratch(size * group, a.head_dim, room_for_rows(a));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      prefill_tile<Q, T>(a, tiles[i].seq, tiles[i].kv_head, tiles[i].first, tiles[i].tokens,
                         scratch);
  }
}
