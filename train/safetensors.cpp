#include "train/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "files/json.h"
#include "files/words.h"

namespace annulus::train {
namespace {

using files::Json;
using files::printable;

constexpr std::size_t kSizeBytes = 8, kMostHeaderBytes = std::size_t{16} << 20;
constexpr std::size_t kMostTensors = 1024, kMostRank = 8;
// Object, tensor, list; a tensor has a dtype, eight extents and two offsets at most.
constexpr files::JsonLimits kHeaderLimits = {.depth = 3, .values = 16 * kMostTensors};

const std::vector<std::string> kNames = {"BOOL", "U8",  "I8",  "I16", "U16", "F16", "BF16",
                                         "I32",  "U32", "F32", "F64", "I64", "U64"};
constexpr std::array<std::size_t, 13> kBytes = {1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};

const std::string& name_of(SafeDType t) { return kNames[static_cast<std::size_t>(t)]; }

template <class... T>
[[noreturn]] void refuse(fmt::format_string<T...> format, T&&... values) {
  throw SafetensorsError(fmt::format(format, std::forward<T>(values)...));
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

struct HeaderTensor {
  std::string name;
  SafeDType dtype = SafeDType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // as the file says; not checked against anything
};

HeaderTensor tensor_of(const std::string& name, const Json& json) {
  const files::JsonObject o(json, printable(name), {"dtype", "shape", "data_offsets"});
  HeaderTensor t{name, static_cast<SafeDType>(o.one_of("dtype", kNames)),
                 o.wholes("shape", kMostRank)};
  const auto offsets = o.wholes("data_offsets", 2);
  if (offsets.size() != 2) throw files::JsonError("data_offsets must be two numbers");
  t.begin = static_cast<std::uint64_t>(offsets[0]);
  t.end = static_cast<std::uint64_t>(offsets[1]);
  return t;
}

std::vector<HeaderTensor> read_header(std::string_view text,
                                      std::map<std::string, std::string>& metadata) {
  // The parser would step over the mark of byte order that some editors put in front.
  if (text.starts_with('\xEF')) refuse("header: not valid JSON: it does not begin with an object");
  std::vector<HeaderTensor> tensors;
  try {
    const Json header = files::parse_json(text, kHeaderLimits);
    if (!header.is_object()) throw files::JsonError("it must be an object");
    for (const auto& [name, value] : header.items()) {
      if (name != "__metadata__") {
        if (tensors.size() == kMostTensors) refuse("header: more than {} tensors", kMostTensors);
        tensors.push_back(tensor_of(name, value));
        continue;
      }
      if (!value.is_object()) throw files::JsonError("__metadata__ must be an object");
      for (const auto& [key, word] : value.items()) {
        if (!word.is_string()) throw files::JsonError("__metadata__ must hold strings only");
        metadata[key] = word.get<std::string>();
      }
    }
  } catch (const files::JsonError& e) {
    refuse("header: {}", e.what());
  }
  return tensors;
}

// The bytes the tensor needs, or an error: the product must fit in 63 bits.
std::uint64_t needed_bytes(const HeaderTensor& t) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::uint64_t n = kBytes[static_cast<std::size_t>(t.dtype)];
  // A zero makes the product zero, but the other extents must be fit to be multiplied all the same.
  bool empty = false;
  for (const std::int64_t extent : t.shape) {
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (n > kMost / static_cast<std::uint64_t>(extent)) {
      refuse("tensor \"{}\": the product of its shape {} does not fit in 63 bits",
             printable(t.name), shape_text(t.shape));
    }
    n *= static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : n;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string bytes) : bytes_(std::move(bytes)) {
  if (bytes_.size() > kMostBytes) {
    refuse("the file has {} bytes; at most {} are read", bytes_.size(), kMostBytes);
  }
  if (bytes_.size() < kSizeBytes) {
    refuse("the file has {} bytes, not even the size of a header", bytes_.size());
  }
  std::uint64_t header_size = 0;
  for (std::size_t i = 0; i < kSizeBytes; ++i) {
    header_size |= std::uint64_t{static_cast<unsigned char>(bytes_[i])} << (8 * i);
  }
  if (header_size > kMostHeaderBytes) {
    refuse("the header claims {} bytes; at most {} are read", header_size, kMostHeaderBytes);
  }
  if (header_size > bytes_.size() - kSizeBytes) {
    refuse("the header claims {} bytes but only {} follow", header_size,
           bytes_.size() - kSizeBytes);
  }
  const auto header_bytes = static_cast<std::size_t>(header_size);
  std::vector<HeaderTensor> header =
      read_header(std::string_view(bytes_).substr(kSizeBytes, header_bytes), metadata_);

  // By place, so that each must begin where the one before ended: no hole and no overlap. Of two at
  // one place the empty one is the first.
  std::sort(header.begin(), header.end(), [](const HeaderTensor& a, const HeaderTensor& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  const auto data = std::as_bytes(std::span(bytes_)).subspan(kSizeBytes + header_bytes);
  std::uint64_t expected = 0;
  for (HeaderTensor& t : header) {
    if (t.end < t.begin || t.end > data.size()) {
      refuse("tensor \"{}\": data_offsets [{}, {}] are not within the {} bytes of data",
             printable(t.name), t.begin, t.end, data.size());
    }
    if (t.begin != expected) {
      refuse("tensor \"{}\": begins at byte {} where {} is due: a hole or an overlap",
             printable(t.name), t.begin, expected);
    }
    const std::uint64_t needed = needed_bytes(t);
    if (t.end - t.begin != needed) {
      refuse("tensor \"{}\": {} of shape {} takes {} bytes but data_offsets span {}",
             printable(t.name), name_of(t.dtype), shape_text(t.shape), needed, t.end - t.begin);
    }
    expected = t.end;
    tensors_.push_back(
        {std::move(t.name), t.dtype, std::move(t.shape),
         data.subspan(static_cast<std::size_t>(t.begin), static_cast<std::size_t>(needed))});
  }
  if (expected != data.size()) {
    refuse("the tensors end at byte {} of the data, which has {}", expected, data.size());
  }
}

const SafeTensor* SafetensorsFile::find(std::string_view name) const {
  for (const SafeTensor& t : tensors_) {
    if (t.name == name) return &t;
  }
  return nullptr;
}

std::vector<float> SafetensorsFile::f32(std::string_view name,
                                        std::span<const std::int64_t> shape) const {
  const SafeTensor* t = find(name);
  if (t == nullptr) refuse("tensor \"{}\" is missing", printable(name));
  if (t->dtype != SafeDType::kF32 ||
      !std::equal(t->shape.begin(), t->shape.end(), shape.begin(), shape.end())) {
    refuse("tensor \"{}\" must be F32 of shape {} but is {} of shape {}", printable(name),
           shape_text(shape), name_of(t->dtype), shape_text(t->shape));
  }
  std::vector<float> values(t->data.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), t->data.data(), t->data.size());
  return values;
}

std::string write_safetensors(std::span<const SafeTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t at = 0;
  for (const SafeTensor& t : tensors) {
    header[t.name] = {{"dtype", name_of(t.dtype)},
                      {"shape", t.shape},
                      {"data_offsets", {at, at + t.data.size()}}};
    at += t.data.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned to 8 bytes

  std::string bytes;
  bytes.reserve(kSizeBytes + text.size() + static_cast<std::size_t>(at));
  for (std::size_t i = 0; i < kSizeBytes; ++i) {
    bytes += static_cast<char>(text.size() >> (8 * i) & 0xFF);
  }
  bytes += text;
  for (const SafeTensor& t : tensors) {
    bytes.append(reinterpret_cast<const char*>(t.data.data()), t.data.size());
  }
  return bytes;
}

}  // namespace annulus::train
