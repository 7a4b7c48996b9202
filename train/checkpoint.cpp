#include "train/checkpoint.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "bench/json_guard.h"
#include "bench/words.h"
#include "train/files.h"
#include "train/recipe_json.h"
#include "train/safetensors.h"
#include "train/xxh64.h"

namespace annulus::train {
namespace {

using json = nlohmann::ordered_json;

constexpr int kSchema = 1;
constexpr const char* kKind = "annulus ring-attractor checkpoint";
constexpr std::size_t kMostManifestBytes = std::size_t{1} << 20;

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }
std::string file_name(std::int64_t step) {
  return fmt::format("checkpoint-{:06}.safetensors", step);
}

SafeTensor f32(std::string name, std::vector<std::int64_t> shape,
               const std::vector<float>& values) {
  return {std::move(name), SafeDType::kF32, std::move(shape), std::as_bytes(std::span(values))};
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw CheckpointError(path + ": " + what);
}

// One key of the manifest, of the type that `is` asks for.
const json& key(const json& object, const std::string& path, const char* name,
                bool (*is)(const json&), const char* rule) {
  if (!object.contains(name)) refuse(path, fmt::format("key \"{}\" is missing", name));
  if (!is(object.at(name))) refuse(path, fmt::format("\"{}\" must be {}", name, rule));
  return object.at(name);
}

bool is_text(const json& j) { return j.is_string(); }
bool is_count(const json& j) {
  return j.is_number_unsigned() && j.get<std::uint64_t>() <= (std::uint64_t{1} << 53);
}
bool is_duration(const json& j) {
  return j.is_number() && j.get<double>() >= 0 && j.get<double>() <= 1e9;
}
bool is_object(const json& j) { return j.is_object(); }
bool is_hash(const json& j) {
  return j.is_string() && j.get_ref<const std::string&>().size() == 16 &&
         j.get_ref<const std::string&>().find_first_not_of("0123456789abcdef") == std::string::npos;
}

void only(const json& object, const std::string& path, const std::vector<std::string>& known) {
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string near = bench::nearest(name, known);
    refuse(path, fmt::format("unknown key \"{}\"{}", bench::printable(name),
                             near.empty() ? "" : fmt::format(", did you mean \"{}\"?", near)));
  }
}

}  // namespace

void save_checkpoint(const std::string& folder, const Trainer& trainer) {
  const std::string path = manifest_path(folder);
  std::string before;
  if (exists(path)) {
    try {
      before = read_manifest(folder).file;
    } catch (const CheckpointError&) {
      // A manifest nobody can read names nothing that is worth removing.
    }
  }
  std::vector<SafeTensor> tensors;
  for (const Parameter& p : trainer.model().parameters()) {
    tensors.push_back(f32(p.name, p.shape, p.value));
    tensors.push_back(f32("adam.mean." + p.name, p.shape, p.mean));
    tensors.push_back(f32("adam.square." + p.name, p.shape, p.square));
  }
  const std::int64_t step = trainer.steps_done();
  tensors.push_back(f32("history.loss", {step}, trainer.history().loss));
  tensors.push_back(f32("history.error", {step}, trainer.history().error));
  const std::vector<std::byte> bytes = write_safetensors(tensors);
  const std::string name = file_name(step);
  write_file(folder + "/" + name, bytes);

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
      {"name", name}, {"bytes", bytes.size()}, {"xxh64", fmt::format("{:016x}", xxh64(bytes))}};
  write_file(path, manifest.dump(2) + "\n");
  if (!before.empty() && before != name) remove_file(folder + "/" + before);
}

bool has_checkpoint(const std::string& folder) { return exists(manifest_path(folder)); }

Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  json j;
  try {
    const std::vector<std::byte> bytes = read_file(path, kMostManifestBytes);
    j = bench::parse_guarded({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, 16,
                             std::size_t{64} << 10);
  } catch (const FileError& e) {
    throw CheckpointError(e.what());
  } catch (const bench::JsonError& e) {
    refuse(path, e.what());
  }
  if (!j.is_object()) refuse(path, "must be a JSON object");
  if (key(j, path, "schema", is_count, "a whole number").get<std::uint64_t>() != kSchema) {
    refuse(path, fmt::format("\"schema\" must be {}", kSchema));
  }
  if (key(j, path, "kind", is_text, "a string").get_ref<const std::string&>() != kKind) {
    refuse(path, fmt::format("\"kind\" must be \"{}\"", kKind));
  }
  only(j, path,
       {"schema", "kind", "version", "commit", "device", "step", "seconds", "recipe", "file"});
  Manifest m;
  m.device = key(j, path, "device", is_text, "a string").get<std::string>();
  m.step = key(j, path, "step", is_count, "a whole number, zero or more").get<std::int64_t>();
  m.seconds = key(j, path, "seconds", is_duration, "a number from 0 to 1e9").get<double>();
  try {
    m.recipe = recipe_from_json(key(j, path, "recipe", is_object, "an object"));
  } catch (const InvalidArgument& e) {
    refuse(path, e.what());
  }
  if (m.step > m.recipe.steps) {
    refuse(path,
           fmt::format("\"step\" is {}, but the recipe has {} steps", m.step, m.recipe.steps));
  }
  const json& file = key(j, path, "file", is_object, "an object");
  only(file, path, {"name", "bytes", "xxh64"});
  m.file = key(file, path, "name", is_text, "a string").get<std::string>();
  m.bytes = key(file, path, "bytes", is_count, "a whole number").get<std::uint64_t>();
  const auto hash =
      key(file, path, "xxh64", is_hash, "16 lower-case hexadecimal digits").get<std::string>();
  m.hash = std::stoull(hash, nullptr, 16);
  // A name of ours and nothing else: no path out of the folder can hide in it.
  if (m.file != file_name(m.step)) {
    refuse(path, fmt::format("the file of step {} must be \"{}\" but is \"{}\"", m.step,
                             file_name(m.step), bench::printable(m.file)));
  }
  return m;
}

void load_checkpoint(const std::string& folder, const Manifest& manifest, Trainer& trainer) {
  const std::string path = folder + "/" + manifest.file;
  try {
    SafetensorsLimits limits;
    std::vector<std::byte> bytes = read_file(path, limits.file_bytes);
    if (bytes.size() != manifest.bytes) {
      refuse(path, fmt::format("has {} bytes, the manifest says {}", bytes.size(), manifest.bytes));
    }
    if (const std::uint64_t hash = xxh64(bytes); hash != manifest.hash) {
      refuse(path, fmt::format("is damaged: its XXH64 is {:016x}, the manifest says {:016x}", hash,
                               manifest.hash));
    }
    const SafetensorsFile file = SafetensorsFile::parse(std::move(bytes), limits);
    // All of it before any of it is taken over.
    std::vector<std::vector<float>> values;
    for (const Parameter& p : trainer.model().parameters()) {
      for (const char* prefix : {"", "adam.mean.", "adam.square."}) {
        values.push_back(file.f32(prefix + p.name, p.shape));
      }
    }
    const std::array<std::int64_t, 1> steps = {manifest.step};
    History history{file.f32("history.loss", steps), file.f32("history.error", steps)};
    if (file.tensors().size() != values.size() + 2) {
      refuse(path, fmt::format("has {} tensors where {} are due", file.tensors().size(),
                               values.size() + 2));
    }
    std::size_t at = 0;
    for (Parameter& p : trainer.model().parameters()) {
      p.value = std::move(values[at++]);
      p.mean = std::move(values[at++]);
      p.square = std::move(values[at++]);
    }
    trainer.restore(std::move(history), manifest.seconds);
  } catch (const SafetensorsError& e) {
    refuse(path, e.what());
  } catch (const FileError& e) {
    throw CheckpointError(e.what());
  }
}

void save_model(const std::string& path, const Trainer& trainer) {
  std::vector<SafeTensor> tensors;
  for (const Parameter& p : trainer.model().parameters()) {
    tensors.push_back(f32(p.name, p.shape, p.value));
  }
  write_file(path, write_safetensors(tensors, {{"format", "annulus ring-attractor"},
                                               {"recipe", to_json(trainer.recipe()).dump()}}));
}

}  // namespace annulus::train
