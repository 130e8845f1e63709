#include "bindings_sampling.h"

#include <string>
#include <utility>

using namespace nanobind::literals;

namespace dualpace {

SamplingArrays::SamplingArrays(
    In<double, 1> temperature, In<int64_t, 1> top_k, In<double, 1> top_p, In<double, 1> min_p,
    In<double, 2> penalties, In<uint64_t, 1> seed, In<int64_t, 1> banned_offsets,
    In<int32_t, 1> banned, In<int64_t, 1> bias_offsets, In<int32_t, 1> biased,
    In<double, 1> biases, In<int64_t, 1> seen_offsets, In<int32_t, 1> seen,
    In<int32_t, 1> seen_counts, In<bool, 1> wants_logprobs)
    : temperature_(std::move(temperature)),
      top_k_(std::move(top_k)),
      top_p_(std::move(top_p)),
      min_p_(std::move(min_p)),
      penalties_(std::move(penalties)),
      seed_(std::move(seed)),
      banned_offsets_(std::move(banned_offsets)),
      banned_(std::move(banned)),
      bias_offsets_(std::move(bias_offsets)),
      biased_(std::move(biased)),
      biases_(std::move(biases)),
      seen_offsets_(std::move(seen_offsets)),
      seen_(std::move(seen)),
      seen_counts_(std::move(seen_counts)),
      wants_logprobs_(std::move(wants_logprobs)) {
  const size_t m = size();
  const bool ok = top_k_.shape(0) == m && top_p_.shape(0) == m && min_p_.shape(0) == m &&
                  penalties_.shape(0) == m && penalties_.shape(1) == 3 && seed_.shape(0) == m &&
                  wants_logprobs_.shape(0) == m;
  require(ok, "sampling parameters must have one value per row");
  require(biases_.shape(0) == biased_.shape(0), "one bias per biased id");
  require(seen_counts_.shape(0) == seen_.shape(0), "one count per seen id");
  for (size_t i = 0; i < m; ++i) {
    require(temperature_(i) >= 0.0, "temperature must not be negative");
  }
}

std::vector<SamplingRow> SamplingArrays::rows(
    int vocab, const std::optional<Out<double, 2>>& logprobs) const {
  const size_t m = size();
  const Ragged banned(banned_offsets_, banned_, m, "banned ids");
  const Ragged biased(bias_offsets_, biased_, m, "biased ids");
  const Ragged seen(seen_offsets_, seen_, m, "seen ids");
  const auto checked = [vocab](const Ragged& lists, size_t row, const char* what) {
    const std::span<const int32_t> ids(lists.begin(row), static_cast<size_t>(lists.length(row)));
    for (const int32_t id : ids) {
      if (id >= 0 && id < vocab) continue;
      throw std::invalid_argument("row " + std::to_string(row) + ": " + what + " id " +
                                  std::to_string(id) + " is out of range");
    }
    return ids;
  };
  int32_t num_top = 0;
  if (logprobs) {
    const size_t width = logprobs->shape(1);
    require(logprobs->shape(0) == m && width >= 2 && width % 2 == 0 &&
                width <= 2 + 2 * static_cast<size_t>(vocab),
            "logprobs must be [rows, 2 + 2 n], n at most the vocabulary");
    num_top = static_cast<int32_t>(width / 2 - 1);
  }
  std::vector<SamplingRow> all(m);
  for (size_t i = 0; i < m; ++i) {
    SamplingRow& row = all[i];
    row.temperature = temperature_(i);
    row.top_k = top_k_(i);
    row.top_p = top_p_(i);
    row.min_p = min_p_(i);
    row.presence_penalty = penalties_(i, 0);
    row.frequency_penalty = penalties_(i, 1);
    row.repetition_penalty = penalties_(i, 2);
    row.seed = seed_(i);
    row.banned = checked(banned, i, "banned");
    row.biased = checked(biased, i, "biased");
    row.biases = {biases_.data() + bias_offsets_(i), row.biased.size()};
    row.seen = checked(seen, i, "seen");
    row.seen_counts = {seen_counts_.data() + seen_offsets_(i), row.seen.size()};
    if (logprobs && wants_logprobs_(i)) {
      row.logprobs = logprobs->data() + i * logprobs->shape(1);
      row.num_top = num_top;
    }
  }
  return all;
}

void bind_sampling(nb::module_& m) {
  nb::class_<SamplingArrays>(m, "Sampling", "Sampling parameters of the rows of an iteration.")
      .def(nb::init<In<double, 1>, In<int64_t, 1>, In<double, 1>, In<double, 1>, In<double, 2>,
                    In<uint64_t, 1>, In<int64_t, 1>, In<int32_t, 1>, In<int64_t, 1>,
                    In<int32_t, 1>, In<double, 1>, In<int64_t, 1>, In<int32_t, 1>,
                    In<int32_t, 1>, In<bool, 1>>(),
           nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "penalties"_a,
           "seed"_a, "banned_offsets"_a, "banned"_a, "bias_offsets"_a, "biased"_a, "biases"_a,
           "seen_offsets"_a, "seen"_a, "seen_counts"_a, "wants_logprobs"_a);
}

}  // namespace dualpace
