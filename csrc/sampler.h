// Stateless sampling: which token follows, given logits, parameters, seed and position.
//
// The same function as the torch sampler, bit for bit up to the rounding of exp and log: the noise
// of a token id comes from a hash of (seed, position, id), so a request may change engines between
// two tokens and nobody can tell.
#pragma once

#include <cstdint>
#include <vector>

namespace dualpace {

struct SamplingRow {
  double temperature = 0.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  uint64_t seed = 0;
  int64_t position = 0;  // absolute position of the token that is chosen
  const int32_t* banned = nullptr;
  int32_t num_banned = 0;
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

  void keep_top_k(int64_t top_k);
  void keep_top_p(double top_p, double maximum);

  std::vector<Candidate> kept_;  // in no order
};

}  // namespace dualpace
