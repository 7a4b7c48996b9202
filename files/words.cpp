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

namespace {

std::string hexadecimal(unsigned char c) {
  constexpr const char* kDigits = "0123456789abcdef";
  return {'\\', 'x', kDigits[c >> 4], kDigits[c & 15]};
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : '\0');
    if (c == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F, of which one is ESC [
      out += hexadecimal(next);
      ++i;
    } else {
      out += c < ' ' || c == 0x7f ? hexadecimal(c) : std::string(1, text[i]);
    }
  }
  return out;
}

std::string printable(std::string_view text, std::size_t max) {
  std::string out;
  for (const char c : text.substr(0, max)) {
    out += c >= ' ' && c <= '~' ? std::string(1, c) : hexadecimal(static_cast<unsigned char>(c));
  }
  if (text.size() > max) out += "...";
  return out;
}

std::string counted(std::size_t n, const char* thing) {
  return std::to_string(n) + " " + thing + (n == 1 ? "" : "s");
}

}  // namespace annulus::files
