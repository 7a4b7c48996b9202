// Text into HTML. Everything that comes from a file passes through text().
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace annulus::bench::report {

// Escaped for element content and quoted attributes alike. Control characters and the bidirectional
// overrides, which make text read as something else, become U+FFFD; longer text is cut at a
// character boundary, so that one field cannot fill the page.
std::string text(std::string_view s, std::size_t max_bytes = 160);

}  // namespace annulus::bench::report
