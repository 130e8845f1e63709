#include "decode_row.h"

#include <stdexcept>
#include <string>

namespace dualpace {

void check_rows(const std::vector<DecodeRow>& rows, int vocab, int64_t num_pages,
                int page_tokens) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const DecodeRow& row = rows[i];
    const auto refuse = [i](const std::string& what, int64_t value) {
      throw std::invalid_argument("row " + std::to_string(i) + ": " + what + " " +
                                  std::to_string(value) + " is out of range");
    };
    if (row.token < 0 || row.token >= vocab) refuse("token id", row.token);
    if (row.position < 0 || row.position / page_tokens >= row.num_pages) {
      refuse("position", row.position);
    }
    for (int64_t p = 0; p <= row.position / page_tokens; ++p) {
      if (row.pages[p] < 0 || row.pages[p] >= num_pages) refuse("page id", row.pages[p]);
    }
  }
}

}  // namespace dualpace
