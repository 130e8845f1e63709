// What Python says about sampling: one array per parameter, checked once, viewed as rows.
#pragma once

#include <optional>
#include <vector>

#include "bindings.h"
#include "sampler.h"

namespace dualpace {

// Keeps the arrays alive, which the rows made of them point into.
class SamplingArrays {
 public:
  SamplingArrays(In<double, 1> temperature, In<int64_t, 1> top_k, In<double, 1> top_p,
                 In<double, 1> min_p, In<double, 2> penalties, In<uint64_t, 1> seed,
                 In<int64_t, 1> banned_offsets, In<int32_t, 1> banned,
                 In<int64_t, 1> bias_offsets, In<int32_t, 1> biased, In<double, 1> biases,
                 In<int64_t, 1> seen_offsets, In<int32_t, 1> seen, In<int32_t, 1> seen_counts,
                 In<bool, 1> wants_logprobs);

  size_t size() const { return temperature_.shape(0); }

  // The rows, but for their positions. `logprobs` is [size, 2 + 2 n]; without it none are written.
  // Throws std::invalid_argument for an id outside the vocabulary.
  std::vector<SamplingRow> rows(int vocab, const std::optional<Out<double, 2>>& logprobs) const;

 private:
  In<double, 1> temperature_;
  In<int64_t, 1> top_k_;
  In<double, 1> top_p_, min_p_;
  In<double, 2> penalties_;
  In<uint64_t, 1> seed_;
  In<int64_t, 1> banned_offsets_;
  In<int32_t, 1> banned_;
  In<int64_t, 1> bias_offsets_;
  In<int32_t, 1> biased_;
  In<double, 1> biases_;
  In<int64_t, 1> seen_offsets_;
  In<int32_t, 1> seen_, seen_counts_;
  In<bool, 1> wants_logprobs_;
};

void bind_sampling(nb::module_& m);

}  // namespace dualpace
