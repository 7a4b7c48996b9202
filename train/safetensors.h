// Files in the safetensors format: named arrays, no code. Eight bytes of header size (little-endian),
// the header (a JSON object), the arrays' bytes. Independent of the rest of Annulus.
//
// The reader is for files from strangers. It takes nothing the format does not allow and less than
// it allows: a header of at most 16 MiB, at most 65 536 tensors, rank at most 8, names and metadata
// of at most 64 KiB in valid UTF-8, no name twice, no unknown key, sizes and products checked in 64
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
std::string_view name_of(SafeDType t);
std::size_t bytes_of(SafeDType t);

struct SafeTensor {
  std::string name;
  SafeDType dtype = SafeDType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // within the file's bytes; any alignment
};

struct SafetensorsLimits {
  std::size_t file_bytes = std::size_t{4} << 30;
  std::size_t header_bytes = std::size_t{16} << 20;
  std::size_t tensors = 65'536;
  std::size_t rank = 8;
  std::size_t string_bytes = std::size_t{64} << 10;
};

class SafetensorsFile {
 public:
  // Takes the bytes of a whole file.
  static SafetensorsFile parse(std::vector<std::byte> bytes, const SafetensorsLimits& limits = {});
  static SafetensorsFile read(const std::string& path, const SafetensorsLimits& limits = {});

  const std::vector<SafeTensor>& tensors() const { return tensors_; }  // in the order of the bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafeTensor* find(std::string_view name) const;
  std::span<const std::byte> bytes() const { return bytes_; }

  // The tensor's values; throws when it is missing or has another dtype or shape.
  std::vector<float> f32(std::string_view name, std::span<const std::int64_t> shape) const;

 private:
  std::vector<std::byte> bytes_;
  std::vector<SafeTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The bytes of a file with these tensors in this order. Names are unique.
std::vector<std::byte> write_safetensors(std::span<const SafeTensor> tensors,
                                         const std::map<std::string, std::string>& metadata = {});

}  // namespace annulus::train
