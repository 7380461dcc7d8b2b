// Entry point of attention. Returns 0, or 1 + the index of the offending sequence, checked before
// anything is written.
#include "attention.h"

#include <vector>

#include "decode.h"
#include "prefill.h"
#include "quantised.h"

namespace {

struct WorkItem {
  int32_t seq, kv_head, begin, end;
};

int check_blocks(const AttentionArgs& a) {
  for (int seq = 0; seq < a.num_seqs; seq++) {
    const int64_t used = ((int64_t)a.seq_lens[seq] + a.block_size - 1) / a.block_size;
    const int query_len = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
    if (used > a.max_blocks || query_len < 1 || query_len > a.seq_lens[seq]) return seq + 1;
    if (seq < a.num_decodes && query_len != 1) return seq + 1;
    const int32_t* table = a.block_tables + (int64_t)seq * a.max_blocks;
    // Blocks that no query sees any more may be gone from the table.
    for (int64_t i = first_visible(a, a.seq_lens[seq] - query_len) / a.block_size; i < used; i++)
      if (table[i] < 0 || table[i] >= a.num_blocks) return seq + 1;
  }
  return 0;
}

// Q is the type of query and out, T that of the cache's rows; both order their pairs alike.
template <class Q, class T>
void decode_item(const AttentionArgs& a, const WorkItem& w, float* acc, Softmax* states) {
  const int group = a.num_heads / a.kv_heads, dim = a.head_dim;
  std::vector<float> query(group * dim), decoded(room_for_rows(a));
  const auto* row = (const typename Q::Scalar*)a.query +
                    a.cu_seqlens_q[w.seq] * a.query_token_stride;
  for (int g = 0; g < group; g++)
    load_row<Q>(row + (w.kv_head * group + g) * a.query_head_stride, &query[g * dim], dim, a.scale);
  for (int i = 0; i < group * dim; i++) acc[i] = 0.0f;
  // A sink is counted once, in the first split of its sequence.
  const bool counts_sink = w.begin == first_visible(a, a.seq_lens[w.seq] - 1);
  for (int g = 0; g < group; g++) states[g] = initial_softmax(a, w.kv_head * group + g, counts_sink);
  const float* q = query.data();
  float* room = decoded.data();
  const int head = w.kv_head;
  switch (dim / kLanes) {
    case 8: decode_heads<T, 8>(a, w.seq, head, group, q, w.begin, w.end, room, acc, states); break;
    case 16:
      decode_heads<T, 16>(a, w.seq, head, group, q, w.begin, w.end, room, acc, states);
      break;
    default: decode_heads<T, 0>(a, w.seq, head, group, q, w.begin, w.end, room, acc, states);
  }
}

// Merges the splits of one (sequence, KV head), always in the same order, and writes the output.
template <class T>
void write_output(const AttentionArgs& a, int seq, int kv_head, int splits, float* acc,
                  const Softmax* states) {
  const int group = a.num_heads / a.kv_heads, dim = a.head_dim;
  auto* row = (typename T::Scalar*)a.out + a.cu_seqlens_q[seq] * a.out_token_stride;
  for (int g = 0; g < group; g++) {
    float max = -INFINITY, sum = 0.0f;
    for (int s = 0; s < splits; s++) max = std::fmax(max, states[s * group + g].max);
    for (int s = 0; s < splits; s++) {
      const Softmax& part = states[s * group + g];
      sum += part.sum * std::exp(part.max - max);
    }
    // The sum of the splits replaces the first of them.
    float* merged = acc + g * dim;
    for (int s = 0; s < splits; s++) {
      const float* part = acc + ((int64_t)s * group + g) * dim;
      const float factor = std::exp(states[s * group + g].max - max);
      for (int i = 0; i < dim; i++) merged[i] = (s ? merged[i] : 0.0f) + part[i] * factor;
    }
    store_row<T>(row + (kv_head * group + g) * a.out_head_stride, merged, dim, sum);
  }
}

template <class Q, class T>
void decode(const AttentionArgs& a) {
  const int group = a.num_heads / a.kv_heads, dim = a.head_dim;
  std::vector<WorkItem> items;
  std::vector<int64_t> first(1, 0);  // of each (sequence, KV head), and one past the last
  for (int seq = 0; seq < a.num_decodes; seq++)
    for (int head = 0; head < a.kv_heads; head++) {
      const int first_token = first_visible(a, a.seq_lens[seq] - 1);
      for (int begin = first_token; begin < a.seq_lens[seq]; begin += kSplit) {
        const int rest = a.seq_lens[seq] - begin;
        items.push_back({seq, head, begin, begin + (rest < kSplit ? rest : kSplit)});
      }
      first.push_back((int64_t)items.size());
    }
  const int64_t num_items = (int64_t)items.size(), num_outputs = (int64_t)first.size() - 1;
  std::vector<float> acc((size_t)num_items * group * dim);
  std::vector<Softmax> states((size_t)num_items * group);
  const int threads = num_items < a.num_threads ? (int)num_items : a.num_threads;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; i++)
      decode_item<Q, T>(a, items[i], &acc[i * group * dim], &states[i * group]);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_outputs; i++)
      write_output<Q>(a, (int)(i / a.kv_heads), (int)(i % a.kv_heads),
                      (int)(first[i + 1] - first[i]), &acc[first[i] * group * dim],
                      &states[first[i] * group]);
  }
}

template <class Q, class T = Q>
void attend(const AttentionArgs& a) {
  if (a.num_decodes > 0) decode<Q, T>(a);
  if (a.num_decodes < a.num_seqs) prefill<Q, T>(a);
}

}  // namespace

extern "C" int tidemill_paged_attention(const AttentionArgs* args) {
  const int bad = check_blocks(*args);
  if (bad) return bad;
  if (!args->is_bfloat16)
    attend<Float32>(*args);
  else if (args->kv_format)
    attend<OrderedBFloat16, Float32>(*args);
  else
    attend<BFloat16>(*args);
  return 0;
}
