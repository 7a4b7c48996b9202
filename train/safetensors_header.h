// The header of a safetensors file, read by a parser that knows this one shape of JSON and no other:
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
//    "__metadata__": {"key": "text", ...}}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "train/safetensors.h"

namespace annulus::train {

struct HeaderTensor {
  std::string name;
  SafeDType dtype = SafeDType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // as the file says; not checked against anything
};

struct Header {
  std::vector<HeaderTensor> tensors;  // names are unique
  std::map<std::string, std::string> metadata;
};

// Throws SafetensorsError with the byte where it stopped.
Header parse_header(std::string_view json, const SafetensorsLimits& limits);
// A JSON string, quotes included; `text` is valid UTF-8.
std::string json_string(std::string_view text);
// Where the first byte is that no valid UTF-8 has there; npos when there is none.
std::size_t find_bad_utf8(std::string_view text);

}  // namespace annulus::train
