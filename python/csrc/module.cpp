// The op namespace "annulus" and what the build says about itself. Operators add themselves to the
// namespace in their own <op>_torch.cpp.
#include <dlfcn.h>
#include <sys/stat.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "annulus/core/info.h"
#include "python/csrc/torch_glue.h"

namespace {

using annulus::DeviceType;

std::string quoted(const std::string& s) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : s) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20) {
      out += "\\u00";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string support_json(const annulus::Support& s) {
  return "{\"available\":" + std::string(s.available ? "true" : "false") +
         ",\"reason\":" + quoted(s.reason) + "}";
}

template <class List, class F>
std::string list_json(const List& list, F&& item) {
  std::string out = "[";
  for (const auto& e : list) {
    if (out.size() > 1) out += ",";
    out += item(e);
  }
  return out + "]";
}

// Not by printf, whose decimal point is the process's.
std::string number_json(double v) {
  char digits[32];
  const auto end =
      std::to_chars(digits, digits + sizeof digits, v, std::chars_format::scientific, 1);
  return {digits, end.ptr};
}

std::string precision_json(const annulus::PrecisionInfo& p) {
  return "{\"name\":" + quoted(p.name) + ",\"product\":" + quoted(p.product) +
         ",\"state_error\":" + number_json(p.state_error) +
         ",\"gradient_error\":" + number_json(p.gradient_error) + "}";
}

std::string operator_json(const annulus::OperatorInfo& op) {
  const auto device = [&op](DeviceType type) {
    return support_json(op.support ? op.support(type) : annulus::Support{});
  };
  return quoted(op.name) + ":{\"summary\":" + quoted(op.summary) + ",\"dtypes\":" +
         list_json(op.dtypes, [](annulus::DType t) { return quoted(annulus::name_of(t)); }) +
         ",\"gradients\":" +
         list_json(op.gradients, [](const std::string& g) { return quoted(g); }) +
         ",\"deterministic\":" + (op.deterministic ? "true" : "false") +
         ",\"cpu\":" + device(DeviceType::kCPU) + ",\"cuda\":" + device(DeviceType::kCUDA) +
         ",\"precisions_measured_with\":" + quoted(op.precisions_measured_with) +
         ",\"precisions\":" + list_json(op.precisions, precision_json) + "}";
}

std::string info_json() {
  return annulus::torch_glue::typed_errors([] {
    const annulus::BuildInfo b = annulus::build_info();
    std::string ops = "{";
    for (const annulus::OperatorInfo& op : annulus::operators()) {
      if (ops.size() > 1) ops += ",";
      ops += operator_json(op);
    }
    return "{\"version\":" + quoted(b.version) + ",\"commit\":" + quoted(b.commit) +
           ",\"compiler\":" + quoted(b.compiler) + ",\"cuda\":" + quoted(b.cuda) +
           ",\"simd\":" + quoted(b.simd) + ",\"blas\":" + quoted(b.blas) +
           ",\"openmp\":" + quoted(b.openmp) + ",\"cpu\":" + quoted(annulus::cpu_name()) +
           ",\"cpu_features\":" + quoted(annulus::cpu_features()) +
           ",\"cpu_threads\":" + std::to_string(annulus::cpu_threads()) + ",\"operators\":" + ops +
           "}}";
  });
}

struct Kept {
  std::mutex mutex;
  std::map<std::string, std::string> backends;
};
Kept& kept() {
  static Kept& all = *new Kept;  // threads may outlive main
  return all;
}

std::string last_backends_json() {
  return annulus::torch_glue::typed_errors([] {
    const std::lock_guard lock(kept().mutex);
    std::string all = "{";
    for (const auto& [op, backend] : kept().backends) {
      if (all.size() > 1) all += ",";
      all += quoted(op) + ":" + quoted(backend);
    }
    return all + "}";
  });
}

// Whether this module is loaded in the child of a fork whose parent had threads. libgomp, which torch shares, then
// believes in the parent's threads and waits for them for ever. (Forks after loading: annulus/cpu/parallel.cpp.)
bool loaded_in_a_fork() {
  // By the C library: this runs while the module is loaded, and C++ streams made there ended the process
  // ("free(): invalid pointer") under an x86_64 torch whose wheel carries parts of another libstdc++.
  unsigned long flags = 0;
  if (std::FILE* file = std::fopen("/proc/self/stat", "re")) {
    char text[1024] = {};
    text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
    std::fclose(file);
    if (const char* name_end = std::strrchr(text, ')')) {
      // state, ppid, pgrp, session, tty_nr, tpgid, flags
      (void)std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags);
    }
  }
  constexpr unsigned long kForkedWithoutExec = 0x40;
  // Not in every glibc that this module may be loaded beside.
  const auto* never_threads =
      static_cast<const char*>(dlsym(RTLD_DEFAULT, "__libc_single_threaded"));
  struct stat tasks {};
  // A child that has threads of its own started them after the fork, torch's import for one.
  return (flags & kForkedWithoutExec) != 0 && (never_threads == nullptr || *never_threads == 0) &&
         stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 3;
}
const bool in_a_fork = loaded_in_a_fork();

}  // namespace

int annulus::torch_glue::call_threads() {
  return in_a_fork ? 1 : static_cast<int>(torch::stable::get_num_threads());
}

void annulus::torch_glue::keep_backends(const Context& context) noexcept {
  try {
    const std::lock_guard lock(kept().mutex);
    for (const Context::Backend& b : context.backends) kept().backends[b.op] = b.text();
  } catch (...) {  // no memory for a note: the call itself is done
  }
}

STABLE_TORCH_LIBRARY(annulus, m) {
  m.def("_info_json() -> str");
  m.def("_last_backends_json() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("_info_json", TORCH_BOX(&info_json));
  m.impl("_last_backends_json", TORCH_BOX(&last_backends_json));
}
