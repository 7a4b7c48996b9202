// An op's schema read at compile time: the text that torch registers is the only list of its
// arguments. A kernel asks for them by name, and a name that is not in the schema does not compile.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

namespace annulus::torch_glue {

// A name as a template argument: a.get<"theta">().
template <std::size_t n>
struct Name {
  char text[n]{};
  consteval Name(const char (&t)[n]) { std::copy_n(t, n, text); }
  constexpr std::string_view view() const { return {text, n - 1}; }
};

struct Argument {
  std::string_view type, name;
};

// "op(A a, B b) -> C" has these parts: "op", "A a, B b" and "C".
constexpr std::string_view name_in(std::string_view schema) {
  return schema.substr(0, schema.find('('));
}
constexpr std::string_view arguments_in(std::string_view schema) {
  const std::size_t begin = schema.find('(') + 1;
  return schema.substr(begin, schema.rfind(") ->") - begin);
}
constexpr std::string_view returns_in(std::string_view schema) {
  return schema.substr(schema.rfind("-> ") + 3);
}

constexpr std::size_t argument_count(std::string_view schema) {
  const std::string_view list = arguments_in(schema);
  return list.empty() ? 0 : static_cast<std::size_t>(std::ranges::count(list, ',')) + 1;
}

constexpr std::size_t return_count(std::string_view schema) {
  const std::string_view list = returns_in(schema);
  return list == "()" ? 0 : static_cast<std::size_t>(std::ranges::count(list, ',')) + 1;
}

template <std::size_t count>
constexpr std::array<Argument, count> arguments_of(std::string_view schema) {
  std::array<Argument, count> arguments{};
  std::string_view rest = arguments_in(schema);
  for (Argument& a : arguments) {
    const std::string_view one = rest.substr(0, rest.find(", "));
    const std::size_t space = one.rfind(' ');
    a = {one.substr(0, space), one.substr(space + 1)};
    rest.remove_prefix(std::min(rest.size(), one.size() + 2));
  }
  return arguments;
}

}  // namespace annulus::torch_glue
