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
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (int32_t i = 0; i < row.num_banned; ++i) logits[row.banned[i]] = kNever;
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
// mass by distance from the maximum, which tells down to where the prefix can reach, and then the
// exact rule on the few above.
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
  // A little more than the target: these sums are rounded in another order than the one below.
  for (double sum = mass[0]; last + 1 < kNumBuckets && sum < target * (1.0 + 1e-9);) {
    sum += mass[++last];
  }
  std::erase_if(kept_, [&](const Candidate& each) { return bucket(each) > last; });
  std::sort(kept_.begin(), kept_.end(), [](const Candidate& a, const Candidate& b) {
    return a.scaled > b.scaled || (a.scaled == b.scaled && a.id < b.id);
  });
  double sum = 0.0;
  for (size_t i = 0; i < kept_.size(); ++i) {
    sum += std::exp(kept_[i].scaled - maximum);
    if (sum >= target) {
      kept_.resize(i + 1);
      return;
    }
  }
}

}  // namespace dualpace
