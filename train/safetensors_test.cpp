// safetensors: what is written comes back; every one of some thousand damaged files is refused with
// the typed error, and none is read beyond its end (run under AddressSanitizer in `make sanitize`).
#include "train/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "train/rng.h"

namespace annulus::train {
namespace {

// A file with this header and so many bytes of data.
std::string file_with(std::string_view header, std::size_t data) {
  std::string bytes;
  for (std::size_t i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes + std::string(header) + std::string(data, '\0');
}

const std::string kGood =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[24,24]},)"
    R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
constexpr std::size_t kGoodData = 26;

std::string good() { return file_with(kGood, kGoodData); }

// The message of the error, empty when there is none.
std::string refusal(std::string bytes) {
  try {
    const SafetensorsFile file(std::move(bytes));
    return "";
  } catch (const SafetensorsError& e) {
    return e.what();
  }
}

TEST(Safetensors, ReadsWhatTheFormatAllows) {
  const SafetensorsFile f(good());
  ASSERT_EQ(f.tensors().size(), 3u);
  EXPECT_EQ(f.metadata().at("format"), "pt");
  EXPECT_EQ(f.find("a")->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(f.find("a")->data.size(), 24u);
  EXPECT_EQ(f.find("none")->data.size(), 0u);
  EXPECT_EQ(f.find("b")->data.size(), 2u);
  EXPECT_EQ(f.find("c"), nullptr);
  EXPECT_EQ(SafetensorsFile(file_with("{}", 0)).tensors().size(), 0u);
  EXPECT_EQ(SafetensorsFile(file_with("  {\n}\t ", 0)).tensors().size(), 0u);
  // Names may be any text, escapes included, and order in the header does not matter.
  const SafetensorsFile g(
      file_with(R"({"\u00fc\n\ud83d\ude00":{"data_offsets":[1,2],"shape":[1],"dtype":"U8"},)"
                R"("x":{"dtype":"BOOL","shape":[1,1],"data_offsets":[0,1]}})",
                2));
  EXPECT_EQ(g.tensors()[1].name, "ü\n😀");
}

TEST(Safetensors, WhatIsWrittenComesBack) {
  const std::vector<float> a = {1, -2.5f, 3e-40f, 4, 5, 6};
  const std::vector<float> none;
  const std::vector<SafeTensor> tensors = {
      {"layer.\"weight\"\n", SafeDType::kF32, {2, 3}, std::as_bytes(std::span(a))},
      {"empty", SafeDType::kF32, {0, 4}, std::as_bytes(std::span(none))},
      {"ü", SafeDType::kF32, {6}, std::as_bytes(std::span(a))}};
  const auto bytes = write_safetensors(tensors, {{"key", "val\\ue"}, {"k2", ""}});
  const SafetensorsFile f(bytes);
  const std::array<std::int64_t, 2> shape = {2, 3};
  EXPECT_EQ(f.f32("layer.\"weight\"\n", shape), a);
  EXPECT_EQ(f.metadata().at("key"), "val\\ue");
  EXPECT_EQ(f.metadata().at("k2"), "");
  EXPECT_EQ(f.tensors().size(), 3u);
  EXPECT_EQ(write_safetensors(f.tensors(), f.metadata()), bytes);
  const std::array<std::int64_t, 2> other = {3, 2};
  EXPECT_THROW(f.f32("layer.\"weight\"\n", other), SafetensorsError);
  EXPECT_THROW(f.f32("no", shape), SafetensorsError);
}

TEST(Safetensors, RefusesByRule) {
  const auto tensor = [](const std::string& body) { return "{\"a\":{" + body + "}}"; };
  const std::string dtype = R"("dtype":"F32",)", shape = R"("shape":[2],)";
  const std::string offsets = R"("data_offsets":[0,8])";
  struct Row {
    const char* why;
    std::string header;
    std::size_t data;
    const char* message;
  };
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  const std::vector<Row> rows = {
      {"nothing", "", 0, "JSON"},
      {"an array", "[]", 0, "object"},
      {"two objects", "{}{}", 0, "JSON"},
      {"a comma at the end", R"({"__metadata__":{},})", 0, "JSON"},
      {"no colon", R"({"a" 1})", 0, "JSON"},
      {"a number for a tensor", R"({"a":1})", 0, "object"},
      {"depth", deep, 0, "deep"},
      {"no dtype", tensor(shape + offsets), 8, "a.dtype\" is missing"},
      {"no shape", tensor(dtype + offsets), 8, "a.shape\" is missing"},
      {"no offsets", tensor(R"("dtype":"F32","shape":[2])"), 8, "a.data_offsets\" is missing"},
      {"an unknown key", tensor(dtype + shape + offsets + ",\"x\":1"), 8, "unknown key"},
      {"a key twice", tensor(dtype + dtype + shape + offsets), 8, "twice"},
      {"an unknown dtype", tensor(R"("dtype":"F31",)" + shape + offsets), 8, "dtype"},
      {"a dtype that is no text", tensor(R"("dtype":9,)" + shape + offsets), 8, "a string"},
      {"a negative extent", tensor(dtype + R"("shape":[-2],)" + offsets), 8, "whole number"},
      {"a fraction", tensor(dtype + R"("shape":[2.0],)" + offsets), 8, "whole number"},
      {"an exponent", tensor(dtype + R"("shape":[2e0],)" + offsets), 8, "whole number"},
      {"a leading zero", tensor(dtype + R"("shape":[02],)" + offsets), 8, "JSON"},
      {"above 2^63", tensor(dtype + R"("shape":[9223372036854775808],)" + offsets), 8,
       "whole number"},
      {"a product above 2^63",
       tensor(dtype + R"("shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0, "63 bits"},
      {"a product that wraps to the right size",
       tensor(dtype + R"("shape":[4611686018427387905,2],"data_offsets":[0,8])"), 8, "63 bits"},
      {"a product above 2^63 beside a zero",
       tensor(dtype + R"("shape":[4294967296,4294967296,0],"data_offsets":[0,0])"), 0, "63 bits"},
      {"rank 9", tensor(dtype + R"("shape":[1,1,1,1,1,1,1,1,2],)" + offsets), 8, "0 to 8 numbers"},
      {"three offsets", tensor(dtype + shape + R"("data_offsets":[0,8,8])"), 8, "0 to 2 numbers"},
      {"one offset", tensor(dtype + shape + R"("data_offsets":[0])"), 8, "two numbers"},
      {"offsets that run backwards", tensor(dtype + shape + R"("data_offsets":[8,0])"), 8,
       "within"},
      {"beyond the end", tensor(dtype + shape + R"("data_offsets":[0,8])"), 7, "within"},
      {"more data than tensors", tensor(dtype + shape + offsets), 9, "end at byte"},
      {"a hole in front", tensor(dtype + shape + R"("data_offsets":[1,9])"), 9, "hole"},
      {"offsets that do not fit the shape", tensor(dtype + shape + R"("data_offsets":[0,4])"), 4,
       "takes 8 bytes"},
      {"overlap",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "hole or an overlap"},
      {"the same place twice",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "hole or an overlap"},
      {"an empty tensor inside another",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
       4, "hole or an overlap"},
      {"an empty tensor beyond the end", R"({"b":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}})",
       4, "within"},
      {"a name twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "twice"},
      {"a name twice, once by an escape",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "twice"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
      {"a metadata key twice", R"({"__metadata__":{"a":"1","a":"2"}})", 0, "twice"},
      {"metadata that is no text", R"({"__metadata__":{"a":1}})", 0, "strings"},
      {"metadata in depth", R"({"__metadata__":{"a":{"b":"c"}}})", 0, "strings"},
      {"a long name", "{\"" + std::string(70000, 'x') + "\":1}", 0, "longer than 65536 bytes"},
      {"bad UTF-8", "{\"a\xc3\x28\":1}", 0, "UTF-8"},
      {"UTF-8 in a longer form than it needs", "{\"\xc0\xaf\":1}", 0, "UTF-8"},
      {"a surrogate in UTF-8", "{\"\xed\xa0\x80\":1}", 0, "UTF-8"},
      {"above U+10FFFF", "{\"\xf5\x80\x80\x80\":1}", 0, "UTF-8"},
      {"half a surrogate pair", R"({"\ud800":1})", 0, "surrogate"},
      {"the other half", R"({"\udc00":1})", 0, "surrogate"},
      {"an unknown escape", R"({"\x41":1})", 0, "JSON"},
      {"a raw newline in a name", "{\"a\nb\":1}", 0, "control character"},
      {"a name without its end", R"({"abc)", 0, "JSON"},
      {"true", R"({"a":true})", 0, "object"},
      {"a mark of byte order", "\xEF\xBB\xBF{}", 0, "object"},
      {"a zero byte after the object", std::string("{}\0x", 4), 0, "zero byte"},
      {"a comment", "{} // all good", 0, "JSON"},
  };
  for (const Row& row : rows) {
    const std::string message = refusal(file_with(row.header, row.data));
    EXPECT_NE(message.find(row.message), std::string::npos) << row.why << ": \"" << message << "\"";
  }
}

TEST(Safetensors, RefusesSizesThatLie) {
  const std::string file = good();
  for (std::size_t n = 0; n < file.size(); ++n) {  // every way to cut it short
    EXPECT_NE(refusal(file.substr(0, n)), "") << n;
  }
  for (const std::uint64_t size :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{kGood.size() - 1},
        std::uint64_t{kGood.size() + 1}, std::uint64_t{1} << 24, (std::uint64_t{1} << 24) + 1,
        std::uint64_t{1} << 32, std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    std::string lying = file;
    for (std::size_t i = 0; i < 8; ++i) lying[i] = static_cast<char>(size >> (8 * i));
    EXPECT_NE(refusal(lying), "") << size;
  }
  EXPECT_NE(refusal(file + '\0'), "");
}

TEST(Safetensors, MoreTensorsThanAllowedAreRefused) {
  const auto tensors = [](int n) {
    std::string header = "{";
    for (int i = 0; i < n; ++i) {
      header += (i ? ",\"" : "\"") + std::to_string(i) +
                R"(":{"dtype":"U8","shape":[1,1,1,1,1,1,1,0],"data_offsets":[0,0]})";
    }
    return file_with(header + "}", 0);
  };
  EXPECT_EQ(refusal(tensors(1024)), "");
  EXPECT_NE(refusal(tensors(1025)).find("more than 1024 tensors"), std::string::npos);
  EXPECT_NE(refusal(tensors(65536)).find("more than 16384 values"), std::string::npos);
}

// Bytes changed, swapped, doubled, dropped at random. Some files stay legal; then all of what they
// hold must lie within them and be written back to the same tensors.
TEST(Safetensors, TwoThousandMutantsDoNoHarm) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(seed);
    std::string file = good();
    const std::int64_t changes = 1 + rng.below(3);
    for (std::int64_t c = 0; c < changes; ++c) {
      // Mostly in the header, where the meaning is.
      const auto at = static_cast<std::size_t>(
          rng.below(static_cast<std::int64_t>(rng.below(8) == 0 ? file.size() : 8 + kGood.size())));
      const std::size_t from = std::min(at, file.size() - 1);
      constexpr std::string_view kTokens = "{}[]\",:0123456789-.eEtfn\\u \xff\x00";
      switch (rng.below(5)) {
        case 0:
          file[from] = static_cast<char>(rng.below(256));
          break;
        case 1:
          file[from] = kTokens[static_cast<std::size_t>(rng.below(kTokens.size()))];
          break;
        case 2:
          file.erase(from, 1);
          break;
        case 3:
          file.insert(from, 1, file[from]);
          break;
        default:
          std::swap(
              file[from],
              file[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(file.size())))]);
      }
    }
    try {
      const SafetensorsFile f(file);
      unsigned sum = 0;
      for (const SafeTensor& t : f.tensors()) {
        for (const std::byte b : t.data) sum += std::to_integer<unsigned>(b);
      }
      const SafetensorsFile again(write_safetensors(f.tensors(), f.metadata()));
      EXPECT_EQ(again.tensors().size(), f.tensors().size());
      EXPECT_GE(sum, 0u);
    } catch (const SafetensorsError& e) {
      ++refused;
      EXPECT_GT(std::strlen(e.what()), 5u);
    }
  }
  EXPECT_GT(refused, 1500);
}

}  // namespace
}  // namespace annulus::train
