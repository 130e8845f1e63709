// Stateless sampling: which token follows, given logits, parameters, seed and position.
//
// The same function as the torch sampler, bit for bit up to the rounding of exp and log: the noise
// of a token id comes from a hash of (seed, position, id), so a request may change engines between
// two tokens and nobody can tell.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dualpace {

// All ids must lie in the vocabulary.
struct SamplingRow {
  double temperature = 0.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;
  uint64_t seed = 0;
  int64_t position = 0;  // absolute position of the token that is chosen
  std::span<const int32_t> banned;
  std::span<const int32_t> biased;  // each id once
  std::span<const double> biases;
  std::span<const int32_t> seen;         // distinct ids of prompt and output
  std::span<const int32_t> seen_counts;  // how often each is in the output
  // Where to write the token's logprob, its rank, the ids of the `num_top` likeliest tokens and
  // their logprobs, all of the model's own distribution: 2 + 2 num_top numbers, or nowhere.
  double* logprobs = nullptr;
  int32_t num_top = 0;
};

// Samples one row after another; holds the scratch memory of one thread.
class Sampler {
 public:
  void reserve(int vocab);

  // Always returns an id in [0, vocab), even if no logit is finite. Overwrites `logits`.
  int32_t sample(float* logits, int vocab, const SamplingRow& row);

 private:
  struct Candidate {
    double scaled;  // logit / temperature
    int32_t id;
  };
  struct Edit {
    int32_t id;
    float before;
  };

  static bool comes_first(const Candidate& a, const Candidate& b) {
    return a.scaled > b.scaled || (a.scaled == b.scaled && a.id < b.id);
  }

  void edit(float* logits, const SamplingRow& row);
  void undo_edits(float* logits);
  int32_t choose(float* logits, int vocab, const SamplingRow& row);
  void keep_top_k(int64_t top_k);
  void keep_top_p(double top_p, double maximum);
  void report(const float* logits, int vocab, int32_t token, const SamplingRow& row);

  std::vector<Candidate> kept_;  // in no order
  std::vector<Candidate> border_;
  std::vector<Edit> edits_;  // in the order in which they were made
};

}  // namespace dualpace
