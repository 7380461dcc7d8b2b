// Philox4x32-10 and Gumbel-max sampling; defined in tidemill_kernels/randomness.py.
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace {

typedef uint64_t WideVec __attribute__((vector_size(64)));

struct Block {
  UintVec words[4];  // words[w][i] is output word w of counter i
};

TM_INLINE void multiply(UintVec a, uint32_t b, UintVec& high, UintVec& low) {
  const WideVec product = __builtin_convertvector(a, WideVec) * (uint64_t)b;
  high = __builtin_convertvector(product >> 32, UintVec);
  low = __builtin_convertvector(product, UintVec);
}

TM_INLINE Block philox(UintVec c0, uint32_t position, uint32_t choice, uint64_t seed) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  UintVec c1 = UintVec{} + position, c2 = UintVec{} + choice, c3 = UintVec{};
  for (int round = 0; round < 10; round++) {
    UintVec high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Block{{c0, c1, c2, c3}};
}

TM_INLINE Vec uniform(UintVec x) {
  return __builtin_convertvector((IntVec)(x >> 9), Vec) * 0x1p-23f + 0x1p-24f;
}

// ln(x) for positive normal x, relative error about 1e-7 also near 1 (Cephes logf).
TM_INLINE Vec log_positive(Vec x) {
  UintVec bits = (UintVec)x;
  Vec exponent = __builtin_convertvector((IntVec)(bits >> 23) - 126, Vec);
  Vec m = (Vec)((bits & 0x007FFFFFu) | 0x3F000000u);
  const IntVec small = m < splat(0.707106781186547524f);
  exponent = small ? exponent - 1.0f : exponent;
  m = (small ? m + m : m) - 1.0f;
  const Vec z = m * m;
  Vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z + exponent * -2.12194440e-4f - z * 0.5f;
  return m + p + exponent * 0.693359375f;
}

double exact_score(float logit, float u) { return (double)logit - std::log(-std::log((double)u)); }

// Tokens whose noise is drawn at once: eight counters of four words.
constexpr int kGroup = 4 * kLanes;
// More than the noise of the largest u, 1 - 2^-24.
constexpr float kMaxNoise = 16.7f;

// Copies `count` logits, -inf in place of what is not finite and beyond the end; returns the max.
TM_INLINE float copy_finite(const float* logits, int count, float* copy) {
  for (int i = count; i < kGroup; i++) copy[i] = -INFINITY;
  std::memcpy(copy, logits, sizeof(float) * count);
  Vec top = splat(-INFINITY);
  for (int i = 0; i < kGroup; i += kLanes) {
    Vec x = Float32::load(copy + i);
    x = ((UintVec)x & 0x7F800000u) == 0x7F800000u ? splat(-INFINITY) : x;
    Float32::store(copy + i, x);
    top = x > top ? x : top;
  }
  return max_lanes(top);
}

struct Candidate {
  float score, logit, uniform;
  int64_t token;
};

// Float32 scores find the few tokens that can win; float64 picks among them. Groups of tokens too
// unlikely to win even with the largest noise are not drawn at all.
int64_t sample_row(const float* logits, int64_t vocab, uint64_t seed, uint32_t choice,
                   uint32_t position, std::vector<Candidate>& candidates) {
  const UintVec lane = {0, 1, 2, 3, 4, 5, 6, 7};
  float best = -INFINITY;
  // Far wider than the error of a float32 score: 1e-5 of noise and the rounding of the sum.
  float margin = INFINITY;
  candidates.clear();
  for (int64_t start = 0; start < vocab; start += kGroup) {
    alignas(32) float copy[kGroup], u[4][kLanes], noise[4][kLanes];
    const int count = vocab - start < kGroup ? (int)(vocab - start) : kGroup;
    const float top = copy_finite(logits + start, count, copy);
    if (top == -INFINITY || top + kMaxNoise < best - margin) continue;
    const Block block = philox(lane + (uint32_t)(start / 4), position, choice, seed);
    for (int w = 0; w < 4; w++) {
      const Vec value = uniform(block.words[w]);
      Float32::store(u[w], value);
      Float32::store(noise[w], -log_positive(-log_positive(value)));
    }
    for (int i = 0; i < count; i++) {
      const float score = copy[i] + noise[i & 3][i >> 2];
      if (score == -INFINITY || score < best - margin) continue;
      candidates.push_back({score, copy[i], u[i & 3][i >> 2], start + i});
      if (score <= best) continue;
      best = score;
      margin = 1e-3f + 1e-6f * std::fabs(best);
    }
  }
  int64_t winner = -1;
  double highest = 0.0;
  for (const Candidate& c : candidates) {
    if (c.score < best - margin) continue;
    const double score = exact_score(c.logit, c.uniform);
    if (winner < 0 || score > highest) highest = score, winner = c.token;
  }
  return winner;
}

}  // namespace

extern "C" void tidemill_philox_uniform(uint64_t seed, uint32_t choice, uint32_t position,
                                        const int64_t* token_ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) {
    const UintVec counter = UintVec{} + (uint32_t)(token_ids[i] >> 2);
    out[i] = uniform(philox(counter, position, choice, seed).words[token_ids[i] & 3])[0];
  }
}

extern "C" void tidemill_gumbel_argmax(const float* logits, int64_t row_stride, int64_t rows,
                                       int64_t vocab, const int64_t* seeds, const int32_t* choices,
                                       const int32_t* positions, int64_t* out, int num_threads) {
  const int threads = rows < num_threads ? (int)rows : num_threads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<Candidate> candidates;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++)
      out[r] = sample_row(logits + r * row_stride, vocab, (uint64_t)seeds[r], (uint32_t)choices[r],
                          (uint32_t)positions[r], candidates);
  }
}
