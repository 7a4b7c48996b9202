#include "train/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "train/files.h"
#include "train/safetensors_header.h"

namespace annulus::train {
namespace {

constexpr std::size_t kSizeBytes = 8;

std::uint64_t read_size(std::span<const std::byte> bytes) {
  std::uint64_t n = 0;
  for (std::size_t i = 0; i < kSizeBytes; ++i) {
    n |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return n;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string s = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    s += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return s + ")";
}

// Names come from the file: control characters and what is not ASCII must not reach a terminal.
std::string in_quotes(std::string_view name) {
  std::string s = "\"";
  for (const char c : name.substr(0, 80)) s += c >= ' ' && c <= '~' ? c : '?';
  return s + (name.size() > 80 ? "...\"" : "\"");
}

// The bytes the tensor needs, or an error: the product must fit in 63 bits.
std::uint64_t needed_bytes(const HeaderTensor& t) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::uint64_t n = bytes_of(t.dtype);
  // A zero makes the product zero, but the other extents must be fit to be multiplied all the same.
  bool empty = false;
  for (const std::int64_t extent : t.shape) {
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (n > kMost / static_cast<std::uint64_t>(extent)) {
      throw SafetensorsError("tensor " + in_quotes(t.name) + ": the product of its shape " +
                             shape_text(t.shape) + " does not fit in 63 bits");
    }
    n *= static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : n;
}

}  // namespace

SafetensorsFile SafetensorsFile::parse(std::vector<std::byte> bytes,
                                       const SafetensorsLimits& limits) {
  if (bytes.size() > limits.file_bytes) {
    throw SafetensorsError("the file has " + std::to_string(bytes.size()) + " bytes; at most " +
                           std::to_string(limits.file_bytes) + " are read");
  }
  if (bytes.size() < kSizeBytes) {
    throw SafetensorsError("the file has " + std::to_string(bytes.size()) +
                           " bytes, not even the size of a header");
  }
  const std::uint64_t header_size = read_size(bytes);
  if (header_size > limits.header_bytes) {
    throw SafetensorsError("the header claims " + std::to_string(header_size) + " bytes; at most " +
                           std::to_string(limits.header_bytes) + " are read");
  }
  if (header_size > bytes.size() - kSizeBytes) {
    throw SafetensorsError("the header claims " + std::to_string(header_size) + " bytes but only " +
                           std::to_string(bytes.size() - kSizeBytes) + " follow");
  }
  SafetensorsFile file;
  file.bytes_ = std::move(bytes);
  const std::span<const std::byte> all = file.bytes_;
  const std::string_view json(reinterpret_cast<const char*>(file.bytes_.data()) + kSizeBytes,
                              static_cast<std::size_t>(header_size));
  Header header = parse_header(json, limits);
  file.metadata_ = std::move(header.metadata);

  // By place, so that each must begin where the one before ended: no hole and no overlap. Of two at
  // one place the empty one is the first.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const HeaderTensor& a, const HeaderTensor& b) {
              return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
            });
  const auto data = all.subspan(kSizeBytes + static_cast<std::size_t>(header_size));
  std::uint64_t expected = 0;
  file.tensors_.reserve(header.tensors.size());
  for (HeaderTensor& t : header.tensors) {
    if (t.end < t.begin || t.end > data.size()) {
      throw SafetensorsError("tensor " + in_quotes(t.name) + ": data_offsets [" +
                             std::to_string(t.begin) + ", " + std::to_string(t.end) +
                             "] are not within the " + std::to_string(data.size()) +
                             " bytes of data");
    }
    if (t.begin != expected) {
      throw SafetensorsError("tensor " + in_quotes(t.name) + ": begins at byte " +
                             std::to_string(t.begin) + " where " + std::to_string(expected) +
                             " is due: a hole or an overlap");
    }
    const std::uint64_t needed = needed_bytes(t);
    if (t.end - t.begin != needed) {
      throw SafetensorsError("tensor " + in_quotes(t.name) + ": " + std::string(name_of(t.dtype)) +
                             " of shape " + shape_text(t.shape) + " takes " +
                             std::to_string(needed) + " bytes but data_offsets span " +
                             std::to_string(t.end - t.begin));
    }
    expected = t.end;
    file.tensors_.push_back(
        {std::move(t.name), t.dtype, std::move(t.shape),
         data.subspan(static_cast<std::size_t>(t.begin), static_cast<std::size_t>(needed))});
  }
  if (expected != data.size()) {
    throw SafetensorsError("the tensors end at byte " + std::to_string(expected) +
                           " of the data, which has " + std::to_string(data.size()));
  }
  return file;
}

SafetensorsFile SafetensorsFile::read(const std::string& path, const SafetensorsLimits& limits) {
  try {
    return parse(read_file(path, limits.file_bytes), limits);
  } catch (const SafetensorsError& e) {
    throw SafetensorsError(path + ": " + e.what());
  } catch (const FileError& e) {
    throw SafetensorsError(e.what());
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
  if (t == nullptr) throw SafetensorsError("tensor " + in_quotes(name) + " is missing");
  if (t->dtype != SafeDType::kF32 ||
      !std::equal(t->shape.begin(), t->shape.end(), shape.begin(), shape.end())) {
    throw SafetensorsError("tensor " + in_quotes(name) + " must be F32 of shape " +
                           shape_text(shape) + " but is " + std::string(name_of(t->dtype)) +
                           " of shape " + shape_text(t->shape));
  }
  std::vector<float> values(t->data.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), t->data.data(), t->data.size());
  return values;
}

std::vector<std::byte> write_safetensors(std::span<const SafeTensor> tensors,
                                         const std::map<std::string, std::string>& metadata) {
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      header += (header.back() == '{' ? "" : ",") + json_string(key) + ":" + json_string(value);
    }
    header += "}";
  }
  std::uint64_t at = 0;
  for (const SafeTensor& t : tensors) {
    if (header.size() > 1) header += ",";
    header +=
        json_string(t.name) + ":{\"dtype\":\"" + std::string(name_of(t.dtype)) + "\",\"shape\":[";
    for (std::size_t i = 0; i < t.shape.size(); ++i) {
      header += (i ? "," : "") + std::to_string(t.shape[i]);
    }
    header += "],\"data_offsets\":[" + std::to_string(at) + ",";
    at += t.data.size();
    header += std::to_string(at) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data is aligned to 8 bytes

  std::vector<std::byte> bytes(kSizeBytes + header.size() + static_cast<std::size_t>(at));
  for (std::size_t i = 0; i < kSizeBytes; ++i) {
    bytes[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xFF);
  }
  std::memcpy(bytes.data() + kSizeBytes, header.data(), header.size());
  std::byte* to = bytes.data() + kSizeBytes + header.size();
  for (const SafeTensor& t : tensors) {
    if (!t.data.empty()) std::memcpy(to, t.data.data(), t.data.size());
    to += t.data.size();
  }
  return bytes;
}

}  // namespace annulus::train
