// annulus: the command line. Results go to stdout, everything else to stderr.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "cli/commands.h"
#include "files/file.h"
#include "files/words.h"

namespace {

using namespace annulus::cli;
using annulus::files::meant;
using annulus::files::printable;

// A standard stream that is closed leaves its number to the next file opened, which would then get
// what is printed. Held by one that cannot be written, what is printed is an error.
void hold_standard_streams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (fcntl(stream, F_GETFD) == -1) static_cast<void>(open("/dev/null", O_RDONLY));
  }
}

// Turns whatever a command throws into its exit code and one line on stderr.
int explain(const std::exception& e, int code) {
  std::cerr << "annulus: " << e.what() << "\n";
  return code;
}

// The command that the words so far have reached.
const CLI::App& innermost(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().back();
  return *at;
}

std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent ? full_name(*parent) + " " + command.get_name() : command.get_name();
}

int run(int argc, char** argv) {
  CLI::App app{"Sequence-model operators: what runs here, is it right, how fast is it."};
  app.name("annulus");
  app.require_subcommand(1);
  app.set_version_flag("--version", "annulus " + annulus::build_info().version + " (" +
                                        annulus::build_info().commit + ")");
  app.footer(kExitCodes);
  int exit_code = kDone;
  add_info_command(app, exit_code);
  add_check_command(app, exit_code);
  add_bench_command(app, exit_code);
  add_report_command(app, exit_code);
  add_plan_command(app, exit_code);
  add_train_command(app, exit_code);
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  const bool named = argc > 1 && argv[1][0] != '-';
  if (named && std::find(known.begin(), known.end(), argv[1]) == known.end()) {
    // CLI11 would only say that a subcommand is required.
    std::cerr << "annulus: unknown command \"" << printable(argv[1]) << "\""
              << meant(argv[1], known) << "\nRun annulus --help for what there is.\n";
    return kBadUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::RequiredError& e) {
    // CLI11 says what is missing before what it did not understand, which is the likelier mistake.
    const CLI::App& command = innermost(app);
    if (command.remaining().empty()) {
      app.exit(e);
    } else {
      std::cerr << "annulus: unknown word \"" << printable(command.remaining().front())
                << "\"\nRun " << full_name(command) << " --help for what there is.\n";
    }
    return kBadUsage;
  } catch (const CLI::ParseError& e) {
    app.exit(e);
    return kBadUsage;
  }
  return exit_code;
}

// A result that did not get out was not given: a full disk must not look like success.
int after_flush(int exit_code) {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0 && std::cout.good() && std::ferror(stdout) == 0;
  if (flushed) return exit_code;
  const int error = errno;
  std::cerr << "annulus: cannot write to stdout"
            << (error != 0 ? std::string(": ") + std::strerror(error) : "") << "\n";
  return exit_code == kDone ? kBadUsage : exit_code;
}

}  // namespace

int annulus::cli::explain_exception() {
  try {
    throw;
  } catch (const annulus::files::FileError& e) {
    return explain(e, kBadUsage);
  } catch (const annulus::InvalidArgument& e) {
    return explain(e, kBadUsage);
  } catch (const std::invalid_argument& e) {  // of the case runner
    return explain(e, kBadUsage);
  } catch (const annulus::NotSupported& e) {
    return explain(e, kNotAvailable);
  } catch (const annulus::DeviceError& e) {
    return explain(e, kNotAvailable);
  } catch (const std::bad_alloc&) {
    std::cerr << "annulus: not enough memory for this\n";
    return kNotAvailable;
  } catch (const std::exception& e) {
    return explain(e, kFailed);
  }
}

int main(int argc, char** argv) {
  hold_standard_streams();
  try {
    return after_flush(run(argc, argv));
  } catch (...) {
    return explain_exception();
  }
}
