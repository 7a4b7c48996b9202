// Text into HTML, and the pieces our pages are made of. Everything that comes from a file passes
// through text(); tile() does so with its words, cell() takes markup.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::draw {

// Escaped for element content and quoted attributes alike. Control characters and the bidirectional
// overrides, which make text read as something else, become U+FFFD; longer text is cut at a
// character boundary, so that one field cannot fill the page.
std::string text(std::string_view s, std::size_t max_bytes = 160);

// A number, what it is, and a line on it.
std::string tile(std::string_view value, std::string_view key, std::string_view detail,
                 std::string_view css = "");

struct Column {
  std::string name;
  bool left = false;  // words; numbers stand to the right
};
std::string open_table(const std::vector<Column>& columns);
std::string cell(std::string_view content, std::string_view css = "");
inline constexpr std::string_view kCloseTable = "</tbody></table></div>";

// One self-contained page: no script, no external address. `body` and `footer` are markup.
std::string page(std::string_view title, std::string_view heading, std::string_view body,
                 std::string_view footer);
inline constexpr std::size_t kMaxPageBytes = 1'000'000;  // who renders one keeps to this

}  // namespace annulus::draw
