#include "files/words.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace annulus::files {

std::string meant(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > 64) return {};
  std::string best;
  std::size_t best_distance = word.size() / 2 + 2;
  for (const std::string& candidate : candidates) {
    // Levenshtein distance, one row at a time.
    std::vector<std::size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 1; i <= word.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i;
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        const std::size_t substituted = diagonal + (word[i - 1] != candidate[j - 1]);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best.empty() ? "" : ", did you mean \"" + best + "\"?";
}

std::string printable(std::string_view text, std::size_t max) {
  std::string out;
  for (const char c : text.substr(0, max)) out += (c >= ' ' && c <= '~') ? c : '?';
  if (text.size() > max) out += "...";
  return out;
}

std::string counted(std::size_t n, const char* thing) {
  return std::to_string(n) + " " + thing + (n == 1 ? "" : "s");
}

}  // namespace annulus::files
