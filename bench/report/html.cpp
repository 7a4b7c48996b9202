#include "bench/report/html.h"

namespace annulus::bench::report {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// U+202A..U+202E and U+2066..U+2069, all of the form E2 80 xx or E2 81 xx.
bool is_bidi_control(std::string_view s) {
  if (s.size() < 3 || s[0] != '\xE2') return false;
  const auto last = static_cast<unsigned char>(s[2]);
  return (s[1] == '\x80' && last >= 0xAA && last <= 0xAE) ||
         (s[1] == '\x81' && last >= 0xA6 && last <= 0xA9);
}

}  // namespace

std::string text(std::string_view s, std::size_t max_bytes) {
  bool cut = false;
  if (s.size() > max_bytes) {
    cut = true;
    std::size_t end = max_bytes;
    while (end > 0 && (static_cast<unsigned char>(s[end]) & 0xC0u) == 0x80u) --end;
    s = s.substr(0, end);
  }
  std::string out;
  out.reserve(s.size() + 16);
  for (std::size_t i = 0; i < s.size(); ++i) {
    const char c = s[i];
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += kReplacement;
    } else if (is_bidi_control(s.substr(i))) {
      out += kReplacement;
      i += 2;
    } else {
      out += c;
    }
  }
  if (cut) out += "…";
  return out;
}

}  // namespace annulus::bench::report
