// A torch op is a struct: `schema`, the text that torch registers; `op`, the name in messages; and
// run(arguments), which returns a Tensor, a tuple or a vector of them, or nothing. The schema is the only
// list of its arguments: here and in Python they are asked for by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/csrc/schema.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {

template <class Op, std::size_t i>
consteval auto tag_of_argument() {
  constexpr std::string_view type = arguments_of<argument_count(Op::schema)>(Op::schema)[i].type;
  if constexpr (type == "Tensor" || type == "Tensor(a!)" || type == "Tensor(b!)") {
    return std::type_identity<Tensor>{};
  } else if constexpr (type == "Tensor?") {
    return std::type_identity<OptionalTensor>{};
  } else if constexpr (type == "int" || type == "SymInt") {
    return std::type_identity<std::int64_t>{};
  } else if constexpr (type == "int[]" || type == "SymInt[]") {
    return std::type_identity<std::vector<std::int64_t>>{};
  } else if constexpr (type == "float") {
    return std::type_identity<double>{};
  } else if constexpr (type == "float?") {
    return std::type_identity<std::optional<double>>{};
  } else if constexpr (type == "bool") {
    return std::type_identity<bool>{};
  } else {
    static_assert(type == "str", "a type that no schema of ours has had so far");
    return std::type_identity<std::string>{};
  }
}

template <class Op, class Indices>
struct ArgumentTuple;
template <class Op, std::size_t... i>
struct ArgumentTuple<Op, std::index_sequence<i...>> {
  using Values = std::tuple<typename decltype(tag_of_argument<Op, i>())::type...>;
  // Takes what the stack holds, as torch asks of a kernel.
  static Values take(StableIValue* stack) {
    return Values{torch::stable::detail::to<std::tuple_element_t<i, Values>>(stack[i])...};
  }
};

template <class Op>
class Arguments {
  static constexpr std::size_t kCount = argument_count(Op::schema);
  using Tuple = ArgumentTuple<Op, std::make_index_sequence<kCount>>;

  static consteval std::size_t index_of(std::string_view name) {
    constexpr auto all = arguments_of<kCount>(Op::schema);
    std::size_t i = 0;
    while (i < kCount && all[i].name != name) ++i;
    return i;  // kCount, which no tuple has, where the schema has no argument of this name
  }

 public:
  static consteval bool has(std::string_view name) { return index_of(name) < kCount; }
  explicit Arguments(StableIValue* stack) : values_(Tuple::take(stack)) {}

  template <Name name>
  const auto& get() const {
    return std::get<index_of(name.view())>(values_);
  }
  // Of a tensor; undefined where it is optional and left out.
  template <Name name>
  TensorView view() const {
    return view_of(Op::op, name.text, get<name>());
  }

 private:
  typename Tuple::Values values_;
};

// The tensor an output is written to: the argument of its name, or one with the described memory.
template <Name name, class Op>
Tensor output(const Arguments<Op>& a, TensorView& y) {
  if constexpr (Arguments<Op>::has(name.view())) {
    y = a.template view<name>();
    return a.template get<name>();
  } else {
    return allocate(Op::op, name.text, y);
  }
}

template <class Op>
void boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  using torch::stable::detail::from;
  const Arguments<Op> arguments(stack);
  const auto call = [&] { return typed_errors([&] { return Op::run(arguments); }); };
  using Result = decltype(call());
  if constexpr (std::is_void_v<Result>) {
    static_assert(return_count(Op::schema) == 0);
    call();
  } else if constexpr (requires { std::tuple_size<Result>::value; }) {
    static_assert(return_count(Op::schema) == std::tuple_size_v<Result>);
    torch::stable::detail::box_from_tuple(stack, call());
  } else {
    static_assert(return_count(Op::schema) == 1);
    stack[0] = from(call());
  }
}

template <class... Ops>
void define(torch::stable::detail::StableLibrary& m) {
  (m.def(Ops::schema.data()), ...);
}
template <class... Ops>
void implement(torch::stable::detail::StableLibrary& m) {
  (m.impl(std::string(name_in(Ops::schema)).c_str(), &boxed<Ops>), ...);
}

}  // namespace annulus::torch_glue

// Registers the ops of an operator. One function serves both keys: the library picks the backend by
// the tensors' device.
#define ANNULUS_TORCH_OPS(...)                                                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) { annulus::torch_glue::define<__VA_ARGS__>(m); }     \
  STABLE_TORCH_LIBRARY_IMPL(annulus, CPU, m) { annulus::torch_glue::implement<__VA_ARGS__>(m); } \
  STABLE_TORCH_LIBRARY_IMPL(annulus, CUDA, m) { annulus::torch_glue::implement<__VA_ARGS__>(m); }
