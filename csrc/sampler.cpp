#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace dualpace {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr double kLn2 = 0.6931471805599453;

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
  int32_t best = 0;
  float top = kNever;
  for (int32_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) logits[i] = kNever;
    if (logits[i] > top) {
      top = logits[i];
      best = i;
    }
  }
  const double maximum = static_cast<double>(top) / row.temperature;
  // Not finite: greedy (x / 0), nothing left to choose from, or a logit beyond all others.
  if (row.temperature == 0.0 || !std::isfinite(maximum)) return best;

  kept_.clear();
  for (int32_t i = 0; i < vocab; ++i) {
    const double scaled = static_cast<double>(logits[i]) / row.temperature;
    if (scaled == -std::numeric_limits<double>::infinity()) continue;
    kept_.push_back({scaled, i});
  }
  if (row.top_k > 0 && row.top_k < static_cast<int64_t>(kept_.size())) {
    // Over all logits: min_p never removes a token above one that it keeps.
    keep_top_k(row.top_k);
  }
  if (row.min_p > 0.0) {
    std::erase_if(kept_, [&](const Candidate& each) {
      return !(std::exp(each.scaled - maximum) >= row.min_p);
    });
  }
  if (row.top_p < 1.0) keep_top_p(row.top_p, maximum);

  const uint64_t key = mix(row.seed + kGolden * (static_cast<uint64_t>(row.position) + 1));
  const auto hash_of = [key](int32_t id) {
    return mix(key + kGolden * (static_cast<uint64_t>(id) + 1));
  };
  // The most likely token first: with its score most others need no logarithm.
  double best_score = maximum + gumbel(hash_of(best));
  for (const Candidate& each : kept_) {
    const uint64_t hash = hash_of(each.id);
    if (each.scaled + gumbel_bound(hash) < best_score) continue;
    const double score = each.scaled + gumbel(hash);
    if (score > best_score || (score == best_score && each.id < best)) {
      best_score = score;
      best = each.id;
    }
  }
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

void Sampler::keep_top_p(double top_p, double maximum) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.scaled > b.scaled || (a.scaled == b.scaled && a.id < b.id);
  };
  double total = 0.0;
  for (const Candidate& each : kept_) total += std::exp(each.scaled - maximum);
  // Sorts a prefix only, and twice as much each time that it was not enough.
  double mass = 0.0;
  size_t done = 0;
  for (size_t sorted = 0; sorted < kept_.size();) {
    const size_t next = std::min(kept_.size(), std::max<size_t>(256, 2 * sorted));
    const auto from = kept_.begin() + static_cast<std::ptrdiff_t>(sorted);
    std::partial_sort(from, kept_.begin() + static_cast<std::ptrdiff_t>(next), kept_.end(), before);
    for (sorted = next; done < sorted;) {
      mass += std::exp(kept_[done++].scaled - maximum);
      if (mass >= top_p * total) {
        kept_.resize(done);
        return;
      }
    }
  }
}

}  // namespace dualpace
