#include "train/files/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/dist/message.h"
#include "files/file.h"
#include "files/json.h"
#include "files/words.h"

namespace annulus::train {
namespace {

using files::FileError;
using files::JsonError;
using files::JsonObject;
using json = files::Json;

constexpr int kSchema = 2;
constexpr const char* kKind = "annulus ring-attractor checkpoint";
constexpr std::size_t kMostManifestBytes = std::size_t{1} << 20;
constexpr std::int64_t kMostCount = std::int64_t{1} << 53;

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }

constexpr std::string_view kBeforeStep = "checkpoint-", kAfterStep = ".safetensors";
std::string file_name(std::int64_t step) {
  return fmt::format("{}{:06}{}", kBeforeStep, step, kAfterStep);
}
bool is_file_name(std::string_view name) {
  if (!name.starts_with(kBeforeStep) || !name.ends_with(kAfterStep)) return false;
  name.remove_prefix(kBeforeStep.size());
  name.remove_suffix(kAfterStep.size());
  return name.size() >= 6 && name.find_first_not_of("0123456789") == std::string_view::npos;
}

// What stands before the data of a file in the safetensors format: named arrays, no code.
class Head {
 public:
  json header;

  void add(const std::string& name, const std::vector<std::int64_t>& shape) {
    const std::size_t begin = data_bytes_;
    std::size_t count = 1;
    for (const std::int64_t n : shape) count *= static_cast<std::size_t>(n);
    data_bytes_ += count * sizeof(float);
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data_bytes_}}};
  }
  std::size_t data_bytes() const { return data_bytes_; }
  // The size of the header in eight bytes, little-endian, and the header.
  std::string text() const {
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned to 8 bytes
    std::string size(8, '\0');
    for (std::size_t i = 0; i < size.size(); ++i) size[i] = static_cast<char>(text.size() >> 8 * i);
    return size + text;
  }

 private:
  std::size_t data_bytes_ = 0;
};

// A checkpoint's, which follows from recipe and step; for_values() has the same order.
Head head_of(const Recipe& recipe, std::int64_t step) {
  Head head;
  for (const auto& [name, shape] : parameter_shapes(recipe)) {
    head.add(name, shape);
    head.add("adam.mean." + name, shape);
    head.add("adam.square." + name, shape);
  }
  head.add("history.loss", {step});
  head.add("history.error", {step});
  return head;
}

template <class Parameters, class Curves, class F>
void for_values(Parameters& parameters, Curves& history, F&& f) {
  for (auto& p : parameters) {
    f(p.value);
    f(p.mean);
    f(p.square);
  }
  f(history.loss);
  f(history.error);
}

void append(std::string& bytes, const std::vector<float>& values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw FileError(path + ": " + what);
}

// What finds damage by a disk or a copy, and is no defence against someone who forges both.
std::uint64_t hash_of(std::string_view bytes) {
  return dist::xxh64(std::as_bytes(std::span(bytes)));
}
std::string digits_of(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

// A manifest ends with the checksum of its bytes, taken with these zeros in its place.
constexpr std::string_view kBeforeSum = "\"xxh64\": \"", kNoSum = "0000000000000000",
                           kAfterSum = "\"\n}\n";

void check_sum(const std::string& path, std::string text) {
  const std::size_t tail = kBeforeSum.size() + kNoSum.size() + kAfterSum.size();
  const std::size_t begin = text.size() < tail ? 0 : text.size() - tail;
  if (!text.ends_with(kAfterSum) ||
      std::string_view(text).substr(begin, kBeforeSum.size()) != kBeforeSum) {
    refuse(path,
           "does not end with its checksum, \"xxh64\": it is cut short, or of an earlier version, "
           "whose runs this one does not continue");
  }
  const std::string said = text.substr(begin + kBeforeSum.size(), kNoSum.size());
  text.replace(begin + kBeforeSum.size(), kNoSum.size(), kNoSum);
  if (const std::string sum = digits_of(hash_of(text)); sum != said) {
    refuse(path,
           fmt::format("is damaged: its XXH64 is {}, it says {}", sum, files::printable(said)));
  }
}

Manifest manifest_of(const json& j, const std::string& folder_name) {
  const JsonObject o(j, "",
                     {"schema", "kind", "version", "commit", "device", "step", "seconds", "recipe",
                      "file", "xxh64"});
  if (o.whole("schema", 0, kMostCount) != kSchema) {
    throw JsonError(fmt::format("\"schema\" must be {}", kSchema));
  }
  if (o.text("kind") != kKind) throw JsonError(fmt::format("\"kind\" must be \"{}\"", kKind));
  Manifest m;
  m.device = o.text("device", true);
  m.step = o.whole("step", 0, kMostCount);
  m.seconds = o.real("seconds", 0, 1e9);
  m.recipe = recipe_from_json(o.at("recipe"));
  if (m.recipe.name != folder_name) {
    throw JsonError(
        fmt::format("\"recipe.name\" must be \"{}\", as the folder is called, but is \"{}\"",
                    folder_name, files::printable(m.recipe.name)));
  }
  if (m.step > m.recipe.steps) {
    throw JsonError(
        fmt::format("\"step\" is {}, but the recipe has {} steps", m.step, m.recipe.steps));
  }
  const JsonObject file = o.object("file", {"name", "bytes", "xxh64"});
  m.file = file.text("name");
  m.bytes = static_cast<std::uint64_t>(file.whole("bytes", 0, kMostCount));
  const std::string hash = file.text("xxh64");
  if (hash.size() != 16 || hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw JsonError("\"file.xxh64\" must be 16 lower-case hexadecimal digits");
  }
  m.hash = std::stoull(hash, nullptr, 16);
  // A name of ours and nothing else: no path out of the folder can hide in it.
  if (m.file != file_name(m.step)) {
    throw JsonError(fmt::format("the file of step {} must be \"{}\" but is \"{}\"", m.step,
                                file_name(m.step), files::printable(m.file)));
  }
  const Head head = head_of(m.recipe, m.step);
  if (const std::size_t bytes = head.text().size() + head.data_bytes(); m.bytes != bytes) {
    throw JsonError(fmt::format("this recipe at step {} makes {} bytes, but \"file.bytes\" is {}",
                                m.step, bytes, m.bytes));
  }
  return m;
}

}  // namespace

void save_checkpoint(const std::string& folder, const Trainer& trainer) {
  const std::string path = manifest_path(folder);
  std::string before;
  try {
    before = read_manifest(folder).file;
  } catch (const FileError&) {
    // There is none, or one that nobody can read, which names nothing that is worth removing.
  }
  const std::int64_t step = trainer.steps_done();
  const std::string name = file_name(step);
  std::string bytes = head_of(trainer.recipe(), step).text();
  for_values(trainer.model().parameters(), trainer.history(),
             [&](const std::vector<float>& values) { append(bytes, values); });
  files::write_file(folder + "/" + name, bytes);

  json manifest;
  manifest["schema"] = kSchema;
  manifest["kind"] = kKind;
  manifest["version"] = build_info().version;
  manifest["commit"] = build_info().commit;
  manifest["device"] = to_string(trainer.model().device());
  manifest["step"] = step;
  manifest["seconds"] = trainer.seconds();
  manifest["recipe"] = to_json(trainer.recipe());
  manifest["file"] = {
      {"name", name}, {"bytes", bytes.size()}, {"xxh64", digits_of(hash_of(bytes))}};
  manifest["xxh64"] = kNoSum;
  std::string text = manifest.dump(2) + "\n";
  const std::string sum = digits_of(hash_of(text));
  text.replace(text.size() - kAfterSum.size() - sum.size(), sum.size(), sum);
  files::write_file(path, text);
  if (!before.empty() && before != name) files::remove_file(folder + "/" + before);
}

bool has_checkpoint(const std::string& folder) { return files::exists(manifest_path(folder)); }

Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  const std::string text = files::read_file(path, kMostManifestBytes);
  check_sum(path, text);
  try {
    return manifest_of(files::parse_json(text), std::filesystem::path(folder).filename().string());
  } catch (const JsonError& e) {
    refuse(path, e.what());
  } catch (const InvalidArgument& e) {
    refuse(path, e.what());
  }
}

std::string read_checkpoint(const std::string& folder, const Manifest& manifest) {
  const std::string path = folder + "/" + manifest.file;
  std::string bytes = files::read_file(path, manifest.bytes);
  if (bytes.size() != manifest.bytes) {
    refuse(path, fmt::format("has {} bytes, the manifest says {}", bytes.size(), manifest.bytes));
  }
  if (const std::uint64_t hash = hash_of(bytes); hash != manifest.hash) {
    refuse(path, fmt::format("is damaged: its XXH64 is {}, the manifest says {}", digits_of(hash),
                             digits_of(manifest.hash)));
  }
  // The file must begin as the one that this program would write at this step, to the byte, and be as
  // long: nothing in it then decides where anything goes.
  const Head head = head_of(manifest.recipe, manifest.step);
  const std::string text = head.text();
  if (!bytes.starts_with(text) || bytes.size() != text.size() + head.data_bytes()) {
    refuse(path, "does not hold the tensors of this recipe at this step");
  }
  for (const auto& [name, about] : head.header.items()) {
    const auto end = text.size() + about["data_offsets"][1].get<std::size_t>();
    for (auto at = text.size() + about["data_offsets"][0].get<std::size_t>(); at < end;
         at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, bytes.data() + at, sizeof(value));
      if (!std::isfinite(value)) refuse(path, fmt::format("{} holds {}, not finite", name, value));
    }
  }
  return bytes;
}

void load_checkpoint(const std::string& bytes, const Manifest& manifest, Trainer& trainer) {
  const auto steps = static_cast<std::size_t>(manifest.step);
  History history{std::vector<float>(steps), std::vector<float>(steps)};
  const char* at = bytes.data() + head_of(manifest.recipe, manifest.step).text().size();
  for_values(trainer.model().parameters(), history, [&](std::vector<float>& values) {
    const std::size_t size = values.size() * sizeof(float);
    std::copy_n(at, size, reinterpret_cast<char*>(values.data()));
    at += size;
  });
  trainer.restore(std::move(history), manifest.seconds);
}

void remove_leftovers(const std::string& folder) {
  for (const char* name : {"manifest.json.", "checkpoint-", "model.safetensors.", "curve.csv."}) {
    files::remove_leftovers(folder, name);
  }
  std::string kept;
  try {
    kept = read_manifest(folder).file;
  } catch (const FileError&) {
    return;  // what no manifest names may be all that is left of a run
  }
  for (const std::string& name : files::names_in(folder)) {
    if (is_file_name(name) && name != kept) files::remove_file(folder + "/" + name);
  }
}

void save_model(const std::string& path, const Trainer& trainer) {
  Head head;
  head.header["__metadata__"] = {{"format", "annulus ring-attractor"},
                                 {"recipe", to_json(trainer.recipe()).dump()}};
  std::string data;
  for (const Parameter& p : trainer.model().parameters()) {
    head.add(p.name, p.shape);
    append(data, p.value);
  }
  files::write_file(path, head.text() + data);
}

}  // namespace annulus::train
