#include "bench/output.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace annulus::bench {
namespace {

#ifdef NDEBUG
constexpr const char* kBuildType = "release";
#else
constexpr const char* kBuildType = "debug";
#endif

std::string significant(double v, int digits = 4) { return fmt::format("{:.{}g}", v, digits); }

// Milliseconds with as many digits as a repetition can be trusted for.
std::string ms(double v) {
  return v >= 100 ? fmt::format("{:.1f}", v)
         : v >= 1 ? fmt::format("{:.3f}", v)
                  : fmt::format("{:.4f}", v);
}

std::string mib(double bytes) { return fmt::format("{:.1f}", bytes / (1 << 20)); }

class Markdown final : public Output {
 public:
  explicit Markdown(std::ostream& out) : out_(out) {}

  void begin(const OutputContext& c) override {
    out_ << fmt::format("{} ({}), annulus {} ({}), {}\n", c.hardware, c.device, c.version, c.commit,
                        c.compiler);
    out_ << "measured ceilings: " << to_string(c.ceilings) << "\n\n";
    line({"row", "dtype", "impl", "median ms", "p95", "floor", "x floor", "x move", "error",
          "peak MiB", "original"});
    for (std::size_t i = 0; i < kColumns; ++i) {
      const std::string rule(static_cast<std::size_t>(kWidths[i]) + 1, '-');
      out_ << "|" << rule << (i < kLeft ? "-" : ":");
    }
    out_ << "|" << std::endl;
  }

  void rows(const std::vector<Record>& records) override {
    double move = 0;
    for (const Record& r : records) {
      if (r.impl == "move" && r.time_ms) move = r.time_ms->median;
    }
    for (const Record& r : records) {
      if (!r.time_ms) {
        out_ << fmt::format("| {:<{}} | {:<{}} | {:<{}} | {}: {} |", r.row, kWidths[0], r.dtype,
                            kWidths[1], r.impl, kWidths[2], name_of(r.status), r.reason)
             << std::endl;
        continue;
      }
      const bool memory = r.measures == Measures::kMemory;
      const double t = r.time_ms->median;
      std::string original;
      if (r.original) {
        original = fmt::format(
            "{} {}", memory ? fmt::format("{:.1f}", r.original->value) : ms(r.original->value),
            r.original->unit);
      }
      line({r.row, r.dtype, r.impl, memory ? "" : ms(t), memory ? "" : ms(r.time_ms->p95),
            r.floor_ms && !memory ? ms(*r.floor_ms) : "",
            r.floor_ms && *r.floor_ms > 0 && !memory ? fmt::format("{:.2f}", t / *r.floor_ms) : "",
            move > 0 && r.impl != "move" && !memory ? fmt::format("{:.2f}", t / move) : "",
            r.error ? significant(r.error->value, 2) : "", r.peak_bytes ? mib(*r.peak_bytes) : "",
            original});
      if (r.status == Status::kFailed) out_ << "  FAILED: " << r.reason << std::endl;
    }
  }

 private:
  static constexpr std::size_t kColumns = 11, kLeft = 3;  // those of words stand to the left
  static constexpr int kWidths[kColumns] = {36, 5, 14, 9, 8, 8, 7, 6, 7, 8, 11};

  void line(const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      out_ << (i < kLeft ? fmt::format("| {:<{}} ", cells[i], kWidths[i])
                         : fmt::format("| {:>{}} ", cells[i], kWidths[i]));
    }
    out_ << "|" << std::endl;
  }

  std::ostream& out_;
};

class Csv final : public Output {
 public:
  explicit Csv(std::ostream& out) : out_(out) {}
  void begin(const OutputContext&) override {
    out_ << "suite,row,op,impl,device,dtype,measures,median_ms,min_ms,p95_ms,n,floor_ms,floor_kind,"
            "error_metric,error,zero_rows,bytes,flops_needed,workspace_bytes,peak_bytes,original_"
            "value,"
            "original_unit,original_hardware,hardware,commit,date,status,reason"
         << std::endl;
  }
  void rows(const std::vector<Record>& records) override {
    for (const Record& r : records) {
      const auto opt = [](const std::optional<double>& v) {
        return v ? significant(*v, 10) : std::string();
      };
      std::vector<std::string> cells = {
          r.suite, r.row, r.op, r.impl, r.device, r.dtype, name_of(r.measures)};
      const auto add = [&](bool there, auto&&... values) {
        (cells.push_back(there ? std::string(values()) : std::string()), ...);
      };
      add(
          r.time_ms.has_value(), [&] { return significant(r.time_ms->median, 6); },
          [&] { return significant(r.time_ms->min, 6); },
          [&] { return significant(r.time_ms->p95, 6); },
          [&] { return std::to_string(r.time_ms->n); });
      cells.push_back(opt(r.floor_ms));
      add(r.floor_kind.has_value(), [&] { return name_of(*r.floor_kind); });
      add(
          r.error.has_value(), [&] { return r.error->metric; },
          [&] { return significant(r.error->value, 6); });
      for (const auto& v :
           {r.zero_rows, r.bytes, r.flops_needed, r.workspace_bytes, r.peak_bytes}) {
        cells.push_back(opt(v));
      }
      add(
          r.original.has_value(), [&] { return significant(r.original->value, 8); },
          [&] { return r.original->unit; }, [&] { return r.original->hardware; });
      for (const auto& s : {r.hardware, r.commit, r.date, name_of(r.status), r.reason}) {
        cells.push_back(s);
      }
      for (std::size_t i = 0; i < cells.size(); ++i) out_ << (i ? "," : "") << quoted(cells[i]);
      out_ << std::endl;
    }
  }

 private:
  static std::string quoted(const std::string& s) {
    if (s.find_first_of(",\"\n\r") == std::string::npos) return s;
    std::string q = "\"";
    for (const char c : s) {
      if (c == '"') q += '"';
      q += c;
    }
    return q + "\"";
  }
  std::ostream& out_;
};

// Google Benchmark's shape, so that its compare.py reads the file; our own record rides along.
class GoogleJson final : public Output {
 public:
  explicit GoogleJson(std::ostream& out) : out_(out) {}
  void begin(const OutputContext& c) override {
    document_["context"] = {{"date", c.date},
                            {"host_name", c.hardware},
                            {"executable", "annulus"},
                            {"library_version", c.version},
                            {"library_build_type", kBuildType},
                            {"commit", c.commit},
                            {"compiler", c.compiler},
                            {"device", c.device},
                            {"copy_gbs", c.ceilings.copy_gbs}};
    for (const Precision p : kAllProducts) {
      document_["context"]["gemm_gflops"][name_of(p)] = c.ceilings.gemm_gflops(p);
    }
    document_["benchmarks"] = nlohmann::ordered_json::array();
  }
  void rows(const std::vector<Record>& records) override {
    for (const Record& r : records) {
      nlohmann::ordered_json b;
      b["name"] = fmt::format("{}/{}/{}/{}/{}", r.suite, r.row, r.dtype, r.device, r.impl);
      b["run_name"] = b["name"];
      b["run_type"] = "iteration";
      if (r.time_ms) {
        b["iterations"] = r.time_ms->n;
        b["real_time"] = r.time_ms->median;
        b["cpu_time"] = r.time_ms->median;
        b["time_unit"] = "ms";
      } else {
        b["error_occurred"] = r.status == Status::kFailed;
        b["skipped"] = r.status == Status::kSkipped;
        b["error_message"] = r.reason;
      }
      b["record"] = nlohmann::ordered_json::parse(to_json_line(r));
      document_["benchmarks"].push_back(std::move(b));
    }
  }
  void end() override { out_ << document_.dump(2) << std::endl; }

 private:
  std::ostream& out_;
  nlohmann::ordered_json document_;
};

}  // namespace

std::string to_string(const Ceilings& c) {
  std::string rates;
  for (const Precision p : kAllProducts) {
    if (!(c.gemm_gflops(p) > 0)) continue;
    rates += fmt::format("{}{} {:.0f}", rates.empty() ? "" : ", ", name_of(p), c.gemm_gflops(p));
  }
  std::string s = fmt::format("copy {:.1f} GB/s", c.copy_gbs);
  s += rates.empty() ? ", GEMM not measured" : ", GEMM " + rates + " GFLOP/s";
  if (c.blas_missing) s += " (our own loop: OpenBLAS could not be loaded)";
  if (c.launch_ms > 0) s += fmt::format(", empty launch {:.1f} us", 1e3 * c.launch_ms);
  if (c.barrier_ms > 0) s += fmt::format(", grid barrier {:.2f} us", 1e3 * c.barrier_ms);
  if (c.small_barrier_ms > 0) {
    s += fmt::format(", cluster barrier {:.2f} us", 1e3 * c.small_barrier_ms);
  }
  return s;
}

std::unique_ptr<Output> make_output(const std::string& format, std::ostream& out) {
  if (format == "csv") return std::make_unique<Csv>(out);
  if (format == "json") return std::make_unique<GoogleJson>(out);
  return std::make_unique<Markdown>(out);
}

}  // namespace annulus::bench
