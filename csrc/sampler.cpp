#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

namespace dualpace {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int32_t kLanes = 16;  // of the search for the maximum
constexpr double kLn2 = 0.6931471805599453;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Of the histogram for top_p: the last bucket takes everything beyond 40 below the maximum.
constexpr size_t kNumBuckets = 641;
constexpr double kBucketsPerUnit = 16.0;
// e^-60 times any vocabulary is less than a rounding error of a sum that has a 1 in it.
constexpr double kNoMass = 60.0;

// The finaliser of splitmix64.
uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

double gumbel(uint64_t hash) {
  const double u = (static_cast<double>(hash >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log(u));
}

// No less than gumbel(hash), without a logarithm: -log(-log u) <= -log(1 - u), and with z leading
// ones in the hash 1 - u is at least 2^-(z+1). The small term makes up for rounding.
double gumbel_bound(uint64_t hash) {
  const int ones = std::countl_one(hash);
  return ones >= 50 ? std::numeric_limits<double>::infinity() : (ones + 1) * kLn2 + 1e-6;
}

}  // namespace

void Sampler::reserve(int vocab) {
  kept_.reserve(static_cast<size_t>(vocab));
}

int32_t Sampler::sample(float* logits, int vocab, const SamplingRow& row) {
  edit(logits, row);
  const int32_t token = choose(logits, vocab, row);
  if (row.logprobs) {
    undo_edits(logits);
    report(logits, vocab, token, row);
  }
  return token;
}

// Each rule is computed in double and rounded to the float that the next one reads.
void Sampler::edit(float* logits, const SamplingRow& row) {
  edits_.clear();
  const auto set = [&](int32_t id, const auto& rule) {
    const float before = std::isnan(logits[id]) ? kNever : logits[id];
    edits_.push_back({id, before});
    logits[id] = static_cast<float>(rule(static_cast<double>(before)));
  };
  for (size_t i = 0; i < row.biased.size(); ++i) {
    set(row.biased[i], [&](double logit) { return logit + row.biases[i]; });
  }
  for (const int32_t id : row.banned) {
    set(id, [](double) { return static_cast<double>(kNever); });
  }
  for (size_t i = 0; i < row.seen.size(); ++i) {
    const double count = row.seen_counts[i];
    set(row.seen[i], [&](double logit) {
      const double repeated =
          logit > 0.0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
      return repeated - row.frequency_penalty * count - (count > 0.0 ? row.presence_penalty : 0.0);
    });
  }
}

void Sampler::undo_edits(float* logits) {
  for (; !edits_.empty(); edits_.pop_back()) logits[edits_.back().id] = edits_.back().before;
}

int32_t Sampler::choose(float* logits, int vocab, const SamplingRow& row) {
  // Lane by lane, which compilers turn into vectors; a comparison with a NaN is false.
  float tops[kLanes];
  std::fill_n(tops, kLanes, kNever);
  const int32_t whole = vocab / kLanes * kLanes;
  for (int32_t i = 0; i < whole; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) {
      tops[j] = logits[i + j] > tops[j] ? logits[i + j] : tops[j];
    }
  }
  for (int32_t i = whole; i < vocab; ++i) tops[0] = logits[i] > tops[0] ? logits[i] : tops[0];
  const float top = *std::max_element(tops, tops + kLanes);
  int32_t best = 0;
  if (top > kNever) best = static_cast<int32_t>(std::find(logits, logits + vocab, top) - logits);
  const double maximum = static_cast<double>(top) / row.temperature;
  // Not finite: greedy (x / 0), nothing left to choose from, or a logit beyond all others.
  if (row.temperature == 0.0 || !std::isfinite(maximum)) return best;

  for (int32_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) logits[i] = kNever;
  }
  const uint64_t key = mix(row.seed + kGolden * (static_cast<uint64_t>(row.position) + 1));
  const auto hash_of = [key](int32_t id) {
    return mix(key + kGolden * (static_cast<uint64_t>(id) + 1));
  };
  // The most likely token first: with its score most others need no logarithm.
  double best_score = maximum + gumbel(hash_of(best));
  const auto consider = [&](double scaled, int32_t id) {
    const uint64_t hash = hash_of(id);
    if (scaled + gumbel_bound(hash) < best_score) return;
    const double score = scaled + gumbel(hash);
    if (score > best_score || (score == best_score && id < best)) {
      best_score = score;
      best = id;
    }
  };

  const bool some_k = row.top_k > 0 && row.top_k < vocab;
  if (!some_k && row.min_p <= 0.0 && row.top_p >= 1.0) {
    for (int32_t i = 0; i < vocab; ++i) {
      consider(static_cast<double>(logits[i]) / row.temperature, i);
    }
    return best;
  }
  kept_.clear();
  for (int32_t i = 0; i < vocab; ++i) {
    const double scaled = static_cast<double>(logits[i]) / row.temperature;
    if (row.min_p > 0.0 && !(std::exp(scaled - maximum) >= row.min_p)) continue;
    kept_.push_back({scaled, i});
  }
  // The k-th largest of all is also the k-th largest of those that min_p keeps, if there are k.
  if (some_k && row.top_k < static_cast<int64_t>(kept_.size())) keep_top_k(row.top_k);
  if (row.top_p < 1.0) keep_top_p(row.top_p, maximum);
  for (const Candidate& each : kept_) consider(each.scaled, each.id);
  return best;
}

void Sampler::keep_top_k(int64_t top_k) {
  const auto kth = kept_.begin() + (top_k - 1);
  std::nth_element(kept_.begin(), kth, kept_.end(), [](const Candidate& a, const Candidate& b) {
    return a.scaled > b.scaled;
  });
  const double threshold = kth->scaled;
  std::erase_if(kept_, [&](const Candidate& each) { return each.scaled < threshold; });
}

// Sorting all of a large vocabulary would take longer than the model. So first a histogram of the
// mass by distance from the maximum, which tells in which bucket the prefix ends; what lies above is
// kept, and only that bucket is sorted.
void Sampler::keep_top_p(double top_p, double maximum) {
  const auto bucket = [maximum](const Candidate& each) {
    const double distance = (maximum - each.scaled) * kBucketsPerUnit;
    return distance < kNumBuckets - 1 ? static_cast<size_t>(distance) : kNumBuckets - 1;
  };
  double mass[kNumBuckets] = {};
  double total = 0.0;
  for (const Candidate& each : kept_) {
    const double distance = maximum - each.scaled;
    if (distance > kNoMass) continue;
    const double weight = std::exp(-distance);
    mass[bucket(each)] += weight;
    total += weight;
  }
  const double target = top_p * total;
  size_t last = 0;
  double sum = 0.0;
  while (last + 1 < kNumBuckets && sum + mass[last] < target) sum += mass[last++];

  border_.clear();
  std::erase_if(kept_, [&](const Candidate& each) {
    const size_t its = bucket(each);
    if (its == last) border_.push_back(each);
    return its >= last;
  });
  std::sort(border_.begin(), border_.end(), comes_first);
  for (const Candidate& each : border_) {
    kept_.push_back(each);
    sum += std::exp(each.scaled - maximum);
    if (sum >= target) return;
  }
}

void Sampler::report(const float* logits, int vocab, int32_t token, const SamplingRow& row) {
  // Ids come in rising order, so that of equal logits the lower id stays ahead.
  const auto likeliest = [](const Candidate& a, const Candidate& b) { return a.scaled > b.scaled; };
  const size_t num_top = static_cast<size_t>(row.num_top);
  border_.clear();
  double top = kNever;
  int64_t likelier = 0;
  for (int32_t i = 0; i < vocab; ++i) {
    const Candidate each{static_cast<double>(logits[i]), i};
    top = std::max(top, each.scaled);
    likelier += logits[i] > logits[token];
    if (border_.size() == num_top) {
      if (num_top == 0 || !likeliest(each, border_.back())) continue;
      border_.pop_back();
    }
    border_.insert(std::upper_bound(border_.begin(), border_.end(), each, likeliest), each);
  }
  double sum = 0.0;
  for (int32_t i = 0; i < vocab; ++i) {
    const double distance = top - static_cast<double>(logits[i]);
    if (distance < kNoMass) sum += std::exp(-distance);
  }
  const double normalizer = top + std::log(sum);
  row.logprobs[0] = static_cast<double>(logits[token]) - normalizer;
  row.logprobs[1] = static_cast<double>(likelier + 1);
  for (size_t i = 0; i < num_top; ++i) {
    row.logprobs[2 + i] = border_[i].id;
    row.logprobs[2 + num_top + i] = border_[i].scaled - normalizer;
  }
}

}  // namespace dualpace
