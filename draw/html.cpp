#include "draw/html.h"

#include <fmt/format.h>

#include "draw/style.h"

namespace annulus::draw {
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
    const char* const entity = c == '&'    ? "&amp;"
                               : c == '<'  ? "&lt;"
                               : c == '>'  ? "&gt;"
                               : c == '"'  ? "&quot;"
                               : c == '\'' ? "&#39;"
                                           : nullptr;
    if (entity != nullptr) {
      out += entity;
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

std::string tile(std::string_view value, std::string_view key, std::string_view detail,
                 std::string_view css) {
  return fmt::format(
      "<div class=\"tile {}\"><div class=\"v\">{}</div><div class=\"k\">{}</div>"
      "<div class=\"d\">{}</div></div>",
      css, text(value), text(key), text(detail));
}

std::string open_table(const std::vector<Column>& columns) {
  std::string s = "<div class=\"scroll\"><table><thead><tr>";
  for (const Column& c : columns) {
    s += fmt::format("<th{}>{}</th>", c.left ? " class=\"l\"" : "", text(c.name, 48));
  }
  return s + "</tr></thead><tbody>";
}

std::string cell(std::string_view content, std::string_view css) {
  return css.empty() ? fmt::format("<td>{}</td>", content)
                     : fmt::format("<td class=\"{}\">{}</td>", css, content);
}

std::string page(std::string_view title, std::string_view heading, std::string_view body,
                 std::string_view footer) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; img-src data:\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
      "<title>{}</title><style>{}</style></head><body><main><header>"
      "<svg width=\"46\" height=\"46\" viewBox=\"0 0 46 46\" aria-hidden=\"true\">"
      "<circle cx=\"23\" cy=\"23\" r=\"17\" fill=\"none\" stroke=\"var(--s0)\" stroke-width=\"8\"/>"
      "<circle cx=\"35\" cy=\"11\" r=\"5\" fill=\"var(--s2)\" stroke=\"var(--bg)\" "
      "stroke-width=\"2\"/></svg><h1>{}</h1></header>{}"
      "<footer><p>{}</p></footer></main></body></html>\n",
      title, kStyle, heading, body, footer);
}

}  // namespace annulus::draw
