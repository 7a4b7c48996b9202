#include "train/safetensors_header.h"

#include <array>
#include <limits>
#include <unordered_set>

namespace annulus::train {
namespace {

constexpr std::array<std::string_view, 13> kNames = {
    "BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"};
constexpr std::array<std::size_t, 13> kBytes = {1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};

void append_utf8(std::string& out, std::uint32_t c) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

class Parser {
 public:
  Parser(std::string_view json, const SafetensorsLimits& limits) : json_(json), limits_(limits) {}

  Header run() {
    Header header;
    std::unordered_set<std::string> names;
    space();
    object([&](std::string&& key) {
      if (!names.insert(key).second) fail("a name appears twice");
      if (key == "__metadata__") {
        metadata(header.metadata);
        return;
      }
      if (header.tensors.size() == limits_.tensors) {
        fail("more than " + std::to_string(limits_.tensors) + " tensors");
      }
      header.tensors.push_back(tensor(std::move(key)));
    });
    space();
    if (at_ != json_.size()) fail("text after the header's object");
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw SafetensorsError("header, byte " + std::to_string(at_) + ": " + what);
  }

  void space() {
    while (at_ < json_.size() &&
           (json_[at_] == ' ' || json_[at_] == '\t' || json_[at_] == '\n' || json_[at_] == '\r')) {
      ++at_;
    }
  }
  bool take(char c) {
    if (at_ == json_.size() || json_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "' expected");
  }

  // Calls value(key) where each value begins.
  template <class F>
  void object(F&& value) {
    expect('{');
    space();
    if (take('}')) return;
    do {
      space();
      std::string key = string();
      space();
      expect(':');
      space();
      value(std::move(key));
      space();
    } while (take(','));
    expect('}');
  }

  std::uint32_t hex4() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < json_.size() ? json_[at_] : '\0';
      std::uint32_t digit = 0;
      if (c >= '0' && c <= '9') {
        digit = static_cast<std::uint32_t>(c - '0');
      } else if (c >= 'a' && c <= 'f') {
        digit = static_cast<std::uint32_t>(c - 'a' + 10);
      } else if (c >= 'A' && c <= 'F') {
        digit = static_cast<std::uint32_t>(c - 'A' + 10);
      } else {
        fail("four hexadecimal digits expected");
      }
      value = value * 16 + digit;
      ++at_;
    }
    return value;
  }

  void escape(std::string& out) {
    const char c = at_ < json_.size() ? json_[at_++] : '\0';
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out += c;
        return;
      case 'b':
        out += '\b';
        return;
      case 'f':
        out += '\f';
        return;
      case 'n':
        out += '\n';
        return;
      case 'r':
        out += '\r';
        return;
      case 't':
        out += '\t';
        return;
      case 'u': {
        std::uint32_t code = hex4();
        if (code >= 0xDC00 && code <= 0xDFFF) fail("half a surrogate pair");
        if (code >= 0xD800 && code <= 0xDBFF) {
          if (!take('\\') || !take('u')) fail("half a surrogate pair");
          const std::uint32_t low = hex4();
          if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        append_utf8(out, code);
        return;
      }
      default:
        fail("an escape that JSON does not have");
    }
  }

  std::string string() {
    expect('"');
    std::string out;
    for (;;) {
      if (at_ == json_.size()) fail("a string without its end");
      const char c = json_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      if (c == '\\') {
        escape(out);
      } else {
        out += c;
      }
      if (out.size() > limits_.string_bytes) {
        fail("a string of more than " + std::to_string(limits_.string_bytes) + " bytes");
      }
    }
  }

  // A whole number from 0 to 2^63 - 1, without sign, point, exponent or leading zero.
  std::uint64_t integer() {
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    const std::size_t first = at_;
    std::uint64_t value = 0;
    while (at_ < json_.size() && json_[at_] >= '0' && json_[at_] <= '9') {
      const auto digit = static_cast<std::uint64_t>(json_[at_] - '0');
      if (value > (kMost - digit) / 10) fail("a number above 2^63 - 1");
      value = value * 10 + digit;
      ++at_;
    }
    if (at_ == first) fail("a whole number, zero or more, expected");
    if (json_[first] == '0' && at_ - first > 1) fail("a number with a leading zero");
    return value;
  }

  // At most `most` whole numbers.
  std::vector<std::uint64_t> integers(std::size_t most, const char* what) {
    std::vector<std::uint64_t> values;
    expect('[');
    space();
    if (take(']')) return values;
    do {
      space();
      if (values.size() == most) {
        fail(std::string(what) + " has more than " + std::to_string(most) + " numbers");
      }
      values.push_back(integer());
      space();
    } while (take(','));
    expect(']');
    return values;
  }

  SafeDType dtype() {
    const std::string name = string();
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      if (kNames[i] == name) return static_cast<SafeDType>(i);
    }
    fail("dtype is none of those known here");
  }

  HeaderTensor tensor(std::string name) {
    HeaderTensor t;
    t.name = std::move(name);
    bool has_dtype = false, has_shape = false, has_offsets = false;
    object([&](std::string&& key) {
      bool* seen = key == "dtype"          ? &has_dtype
                   : key == "shape"        ? &has_shape
                   : key == "data_offsets" ? &has_offsets
                                           : nullptr;
      if (seen == nullptr) fail("a tensor has a key other than dtype, shape and data_offsets");
      if (*seen) fail("a tensor has the key " + key + " twice");
      *seen = true;
      if (seen == &has_dtype) {
        t.dtype = dtype();
      } else if (seen == &has_shape) {
        for (const std::uint64_t n : integers(limits_.rank, "shape")) {
          t.shape.push_back(static_cast<std::int64_t>(n));
        }
      } else {
        const auto offsets = integers(2, "data_offsets");
        if (offsets.size() != 2) fail("data_offsets must be two numbers");
        t.begin = offsets[0];
        t.end = offsets[1];
      }
    });
    if (!has_dtype || !has_shape || !has_offsets) {
      fail("a tensor lacks dtype, shape or data_offsets");
    }
    return t;
  }

  void metadata(std::map<std::string, std::string>& out) {
    object([&](std::string&& key) {
      if (out.size() == limits_.tensors) fail("too many keys in __metadata__");
      std::string value = string();
      if (!out.emplace(std::move(key), std::move(value)).second) {
        fail("a key of __metadata__ appears twice");
      }
    });
  }

  std::string_view json_;
  const SafetensorsLimits& limits_;
  std::size_t at_ = 0;
};

}  // namespace

std::string_view name_of(SafeDType t) { return kNames[static_cast<std::size_t>(t)]; }
std::size_t bytes_of(SafeDType t) { return kBytes[static_cast<std::size_t>(t)]; }

Header parse_header(std::string_view json, const SafetensorsLimits& limits) {
  if (const std::size_t bad = find_bad_utf8(json); bad != std::string_view::npos) {
    throw SafetensorsError("header, byte " + std::to_string(bad) + ": not UTF-8");
  }
  return Parser(json, limits).run();
}

std::size_t find_bad_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char c = byte(i);
    if (c < 0x80) {
      ++i;
      continue;
    }
    // Length, and the least code point that needs it: shorter forms of it are not allowed.
    const std::size_t length = (c & 0xE0u) == 0xC0u   ? 2
                               : (c & 0xF0u) == 0xE0u ? 3
                               : (c & 0xF8u) == 0xF0u ? 4
                                                      : 0;
    if (length == 0 || text.size() - i < length) return i;
    std::uint32_t code = c & (0x7Fu >> length);
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0u) != 0x80u) return i;
      code = code << 6 | (byte(i + k) & 0x3Fu);
    }
    constexpr std::array<std::uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kLeast[length] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return i;
    i += length;
  }
  return std::string_view::npos;
}

std::string json_string(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[static_cast<unsigned char>(c) & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace annulus::train
