#include "train/checkpoint.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "files/file.h"
#include "files/json.h"
#include "files/words.h"

namespace annulus::train {
namespace {

using files::FileError;
using files::JsonError;
using files::JsonObject;
using json = files::Json;

constexpr int kSchema = 1;
constexpr const char* kKind = "annulus ring-attractor checkpoint";
constexpr std::size_t kMostManifestBytes = std::size_t{1} << 20,
                      kMostTensorBytes = std::size_t{4} << 30;
constexpr std::int64_t kMostCount = std::int64_t{1} << 53;

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }
std::string file_name(std::int64_t step) {
  return fmt::format("checkpoint-{:06}.safetensors", step);
}

// A file in the safetensors format: named arrays, no code.
class TensorFile {
 public:
  json header;

  void add(const std::string& name, const std::vector<std::int64_t>& shape,
           const std::vector<float>& values) {
    const std::size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data_.size()}}};
  }
  const std::string& data() const { return data_; }
  // What stands before the data: the size of the header in eight bytes, little-endian, and the header.
  std::string head() const {
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned to 8 bytes
    std::string size(8, '\0');
    for (std::size_t i = 0; i < size.size(); ++i) size[i] = static_cast<char>(text.size() >> 8 * i);
    return size + text;
  }

 private:
  std::string data_;
};

// f(name, shape, values) of every array of a checkpoint, in the order of the file.
template <class Parameters, class Curves, class F>
void for_arrays(Parameters& parameters, Curves& history, F&& f) {
  for (auto& p : parameters) {
    f(p.name, p.shape, p.value);
    f("adam.mean." + p.name, p.shape, p.mean);
    f("adam.square." + p.name, p.shape, p.square);
  }
  const std::vector<std::int64_t> steps = {static_cast<std::int64_t>(history.loss.size())};
  f("history.loss", steps, history.loss);
  f("history.error", steps, history.error);
}

TensorFile tensors_of(const RingModel& model, const History& history) {
  TensorFile file;
  for_arrays(model.parameters(), history,
             [&](const auto& name, const auto& shape, const auto& values) {
               file.add(name, shape, values);
             });
  return file;
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw FileError(path + ": " + what);
}

// What finds damage by a disk or a copy, and is no defence against someone who forges both.
std::uint64_t hash_of(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

Manifest manifest_of(const json& j) {
  const JsonObject o(
      j, "",
      {"schema", "kind", "version", "commit", "device", "step", "seconds", "recipe", "file"});
  if (o.whole("schema", 0, kMostCount) != kSchema) {
    throw JsonError(fmt::format("\"schema\" must be {}", kSchema));
  }
  if (o.text("kind") != kKind) throw JsonError(fmt::format("\"kind\" must be \"{}\"", kKind));
  Manifest m;
  m.device = o.text("device", true);
  m.step = o.whole("step", 0, kMostCount);
  m.seconds = o.real("seconds", 0, 1e9);
  m.recipe = recipe_from_json(o.at("recipe"));
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
  const TensorFile tensors = tensors_of(trainer.model(), trainer.history());
  const std::string bytes = tensors.head() + tensors.data(), name = file_name(step);
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
      {"name", name}, {"bytes", bytes.size()}, {"xxh64", fmt::format("{:016x}", hash_of(bytes))}};
  files::write_file(path, manifest.dump(2) + "\n");
  if (!before.empty() && before != name) files::remove_file(folder + "/" + before);
}

bool has_checkpoint(const std::string& folder) { return files::exists(manifest_path(folder)); }

Manifest read_manifest(const std::string& folder) {
  const std::string path = manifest_path(folder);
  const std::string text = files::read_file(path, kMostManifestBytes);
  try {
    return manifest_of(files::parse_json(text));
  } catch (const JsonError& e) {
    refuse(path, e.what());
  } catch (const InvalidArgument& e) {
    refuse(path, e.what());
  }
}

void load_checkpoint(const std::string& folder, const Manifest& manifest, Trainer& trainer) {
  const std::string path = folder + "/" + manifest.file;
  const std::string bytes = files::read_file(path, kMostTensorBytes);
  if (bytes.size() != manifest.bytes) {
    refuse(path, fmt::format("has {} bytes, the manifest says {}", bytes.size(), manifest.bytes));
  }
  if (const std::uint64_t hash = hash_of(bytes); hash != manifest.hash) {
    refuse(path, fmt::format("is damaged: its XXH64 is {:016x}, the manifest says {:016x}", hash,
                             manifest.hash));
  }
  // The file must begin as the one that this trainer would write at this step, to the byte, and be as
  // long: nothing in it then decides where anything goes, and nothing is taken over before that holds.
  const auto steps = static_cast<std::size_t>(manifest.step);
  History history{std::vector<float>(steps), std::vector<float>(steps)};
  const TensorFile expected = tensors_of(trainer.model(), history);
  const std::string head = expected.head();
  if (!bytes.starts_with(head) || bytes.size() != head.size() + expected.data().size()) {
    refuse(path, "does not hold the tensors of this recipe at this step");
  }
  const char* at = bytes.data() + head.size();
  for_arrays(trainer.model().parameters(), history,
             [&](const auto&, const auto&, std::vector<float>& values) {
               const std::size_t size = values.size() * sizeof(float);
               std::copy_n(at, size, reinterpret_cast<char*>(values.data()));
               at += size;
             });
  trainer.restore(std::move(history), manifest.seconds);
}

void save_model(const std::string& path, const Trainer& trainer) {
  TensorFile file;
  file.header["__metadata__"] = {{"format", "annulus ring-attractor"},
                                 {"recipe", to_json(trainer.recipe()).dump()}};
  for (const Parameter& p : trainer.model().parameters()) file.add(p.name, p.shape, p.value);
  files::write_file(path, file.head() + file.data());
}

}  // namespace annulus::train
