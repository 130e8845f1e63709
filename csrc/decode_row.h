// One row of an iteration: a token whose K and V are written, and which attends to what is before it.
//
// Knows neither models nor kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "sampler.h"

namespace dualpace {

struct DecodeRow {
  int32_t token = 0;
  int64_t position = 0;  // of the token; its K and V are written there
  const int32_t* pages = nullptr;
  int64_t num_pages = 0;
  SamplingRow sampling;  // sampling.position is position + 1; of no use where none is sampled
};

// Throws std::invalid_argument for a token, position or page out of range: of `num_pages` pages of
// `page_tokens` tokens.
void check_rows(const std::vector<DecodeRow>& rows, int vocab, int64_t num_pages, int page_tokens);

}  // namespace dualpace
