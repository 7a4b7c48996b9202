// Files in the safetensors format: named arrays, no code. Eight bytes of header size (little-endian),
// the header, the arrays' bytes. The header is a JSON object:
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
//    "__metadata__": {"key": "text", ...}}
//
// The reader is for files from strangers. It takes nothing the format does not allow and less than
// it allows: a header of at most 16 MiB, at most 1024 tensors, rank at most 8, names and metadata of
// at most 64 KiB in valid UTF-8, no name twice, no unknown key, sizes and products checked in 64
// bits, and tensors that lie one after the other without hole or overlap (empty ones included) and
// fill the file exactly. No number in a file decides how much memory is taken before it was checked
// against the size of the file. Whatever is wrong throws SafetensorsError, which says what and where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::train {

class SafetensorsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class SafeDType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64
};

struct SafeTensor {
  std::string name;
  SafeDType dtype = SafeDType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // within the file's bytes; any alignment
};

class SafetensorsFile {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{4} << 30;

  explicit SafetensorsFile(std::string bytes);       // of a whole file
  SafetensorsFile(const SafetensorsFile&) = delete;  // tensors point into it
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::vector<SafeTensor>& tensors() const { return tensors_; }  // in the order of the bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafeTensor* find(std::string_view name) const;

  // The tensor's values; throws when it is missing or has another dtype or shape.
  std::vector<float> f32(std::string_view name, std::span<const std::int64_t> shape) const;

 private:
  std::string bytes_;
  std::vector<SafeTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The bytes of a file with these tensors in this order. Names are unique, and valid UTF-8.
std::string write_safetensors(std::span<const SafeTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace annulus::train
