// Tensors, checks, checked arithmetic, DLPack, workspace accounting, backends, 16-bit numbers.
#include <gtest/gtest.h>

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#define ANNULUS_TEST_DLPACK 1
#endif

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "annulus/annulus.h"
#include "annulus/core/check.h"
#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/core/scratch.h"
#include "testing/memory/allocator.h"
#include "testing/memory/tensors.h"

namespace annulus {
namespace {

// The message of what f throws as E; fails the test when it throws nothing or something else.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "threw another type: " << e.what();
    return {};
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}

TEST(Checked, RefusesWhatDoesNotFit) {
  EXPECT_EQ(checked_mul(1ll << 31, 1ll << 31, "op"), 1ll << 62);
  EXPECT_THROW(checked_mul(1ll << 32, 1ll << 31, "op"), InvalidArgument);
  EXPECT_THROW(checked_add(INT64_MAX, 1, "op"), InvalidArgument);
  EXPECT_EQ(message_of<InvalidArgument>([] { checked_mul(INT64_MAX, 2, "op"); }),
            "[op] a size must fit in 63 bits but 9223372036854775807 * 2 does not");
  EXPECT_EQ(ceil_div(7, 4), 2);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(round_up(9, 4), 12);
}

TEST(Tensor, ContiguousStridesAndNames) {
  std::vector<float> data(24);
  const TensorView v = contiguous(data.data(), {2, 3, 4});
  EXPECT_EQ(v.dtype, DType::kF32);
  EXPECT_EQ(v.stride[0], 12);
  EXPECT_EQ(v.stride[1], 4);
  EXPECT_EQ(v.stride[2], 1);
  EXPECT_EQ(v.numel(), 24);
  EXPECT_EQ(shape_string(v.sizes()), "(2, 3, 4)");
  EXPECT_EQ(shape_string(contiguous(data.data(), {5}).sizes()), "(5,)");
  EXPECT_FALSE(TensorView().defined());
  EXPECT_EQ(TensorView().numel(), 0);
  EXPECT_EQ(contiguous(data.data(), {2, 0, 4}).numel(), 0);
  EXPECT_THROW(contiguous(data.data(), {1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
}

TEST(Tensor, StridedIndexes) {
  std::vector<double> data(12);
  for (std::size_t i = 0; i < 12; ++i) data[i] = static_cast<double>(i);
  const std::array<std::int64_t, 2> shape = {3, 4};
  const std::array<std::int64_t, 2> by_columns = {1, 3};
  const auto t = as_strided<double, 2>(strided(data.data(), DType::kF64, shape, by_columns));
  EXPECT_EQ(t(2, 1), 5);
  EXPECT_EQ(t.offset(0, 3), 9);
  EXPECT_THROW(strided(data.data(), DType::kF64, shape, std::array<std::int64_t, 1>{1}),
               InvalidArgument);
}

TEST(Check, MessagesNameOperatorArgumentRuleAndValue) {
  std::vector<float> data(64);
  const TensorView v = contiguous(data.data(), {2, 3});
  EXPECT_EQ(message_of<InvalidArgument>([&] { check_tensor("op", "x", v, 4); }),
            "[op] x must have 4 dimensions but has shape (2, 3)");
  EXPECT_EQ(message_of<InvalidArgument>([&] { check_tensor("op", "x", {}, 4); }),
            "[op] x must be given but is missing");
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              check_shape("op", "x", v, {2, 4});
            }),
            "[op] x must have shape (2, 4) but has (2, 3)");
  EXPECT_EQ(message_of<InvalidArgument>([&] { check_dtype("op", "x", v, {DType::kF64}); }),
            "[op] x must be f64 but is f32");
  TensorView cuda = v;
  cuda.device = cuda_device(1);
  const std::string device =
      message_of<InvalidArgument>([&] { check_device("op", "y", cuda, "x", v); });
  EXPECT_NE(device.find("y must be on the device of x"), std::string::npos) << device;
  EXPECT_NE(device.find("cuda:1"), std::string::npos) << device;
}

TEST(Check, OutputLayouts) {
  std::vector<float> data(64);
  TensorView v = contiguous(data.data(), {2, 3, 4});
  EXPECT_NO_THROW(check_output_layout("op", "y", v));
  v.stride = {-12, 4, 1};
  EXPECT_NO_THROW(check_output_layout("op", "y", v));
  v.stride = {12, 3, 1};  // rows of 4 that begin every 3
  EXPECT_THROW(check_output_layout("op", "y", v), InvalidArgument);
  v.stride = {0, 4, 1};
  EXPECT_THROW(check_output_layout("op", "y", v), InvalidArgument);
  v.shape = {1, 3, 4};  // a stride over one element is never used
  EXPECT_NO_THROW(check_output_layout("op", "y", v));
}

TEST(Check, Overlap) {
  std::vector<float> data(64);
  const TensorView a = contiguous(data.data(), {8});
  const TensorView b = contiguous(data.data() + 8, {8});
  EXPECT_NO_THROW(check_no_overlap("op", "y", a, "x", b));
  EXPECT_THROW(check_no_overlap("op", "y", a, "x", contiguous(data.data() + 7, {8})),
               InvalidArgument);
  TensorView reversed = contiguous(data.data() + 15, {8});
  reversed.stride[0] = -1;  // 8 .. 15
  EXPECT_NO_THROW(check_no_overlap("op", "y", a, "x", reversed));
  reversed.data = data.data() + 14;
  EXPECT_THROW(check_no_overlap("op", "y", a, "x", reversed), InvalidArgument);
  EXPECT_NO_THROW(check_no_overlap("op", "y", a, "x", contiguous(data.data(), {0})));
}

TEST(Check, OverlapOfColumns) {
  std::vector<float> data(64);
  // So many columns of rows of 8, from one on.
  const auto columns = [&](std::int64_t first, std::int64_t count, std::int64_t row = 8) {
    TensorView v = contiguous(data.data() + first, {2, 3, count});
    v.stride = {3 * row, row, 1};
    return v;
  };
  const auto overlap = [](const TensorView& a, const TensorView& b) {
    check_no_overlap("op", "y", a, "x", b);
  };
  EXPECT_NO_THROW(overlap(columns(0, 3), columns(3, 5)));
  EXPECT_NO_THROW(overlap(columns(3, 5), columns(0, 3)));
  EXPECT_NO_THROW(overlap(columns(6, 2), columns(8, 6)));  // of the next row
  EXPECT_THROW(overlap(columns(0, 4), columns(3, 5)), InvalidArgument);
  EXPECT_THROW(overlap(columns(3, 5), columns(0, 4)), InvalidArgument);
  EXPECT_THROW(overlap(columns(6, 4), columns(0, 3)), InvalidArgument);  // over the end of a row
  EXPECT_THROW(overlap(columns(0, 3), columns(3, 5, 9)),
               InvalidArgument);  // rows of another length
  TensorView reversed = columns(7, 4);
  reversed.stride[2] = -1;  // columns 7 .. 4
  EXPECT_NO_THROW(overlap(columns(0, 4), reversed));
  EXPECT_THROW(overlap(columns(0, 5), reversed), InvalidArgument);
}

TEST(Workspace, CountsAndCarves) {
  testing::TestAllocator allocator;
  Context context;
  context.allocator = &allocator;
  {
    float* a = nullptr;
    double* b = nullptr;
    const auto lay_out = [&](ScratchLayout& scratch) {
      scratch(a, 25);
      b = scratch.take<double>(3);
    };
    EXPECT_EQ(scratch_bytes(lay_out), 512u + 256u);  // at any address
    EXPECT_EQ(a, nullptr);                           // counted alone
    Workspace w(context, "op", kCPU, lay_out);
    EXPECT_EQ(context.workspace_bytes, 768u);
    EXPECT_EQ(reinterpret_cast<std::byte*>(a), w.data());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 256, 0u);  // which the allocator's is not
    EXPECT_EQ(reinterpret_cast<std::byte*>(b) - reinterpret_cast<std::byte*>(a), 256);
    Workspace inner(context, "op", kCPU, 100);
    EXPECT_EQ(context.workspace_peak, 868u);
  }
  EXPECT_EQ(context.workspace_bytes, 0u);
  EXPECT_EQ(context.workspace_peak, 868u);
  EXPECT_EQ(allocator.fault(), "");
  Workspace none(context, "op", kCPU, 0);
  EXPECT_EQ(allocator.calls(), 2);  // zero bytes ask for nothing
}

TEST(Workspace, AFailureIsTyped) {
  testing::TestAllocator allocator(0);
  Context context;
  context.allocator = &allocator;
  EXPECT_EQ(message_of<DeviceError>([&] { Workspace w(context, "op", kCPU, 77); }),
            "[op] could not allocate 77 bytes of workspace on cpu");
  EXPECT_EQ(context.workspace_bytes, 0u);
  EXPECT_EQ(context.workspace_peak, 0u);
}

TEST(Workspace, Borrowed) {
  float* piece = nullptr;
  const auto lay_out = [&](ScratchLayout& scratch) { scratch(piece, 64); };
  std::array<std::byte, 512 + 300> room;
  for (std::size_t at = 0; at < 300; ++at) {  // at any address, and it can be used again
    BorrowedWorkspace borrowed(room.data() + at, scratch_bytes(lay_out));
    Context context;
    context.allocator = &borrowed;
    for (int i = 0; i < 2; ++i) {
      Workspace w(context, "op", kCPU, lay_out);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece) % 256, 0u);
      EXPECT_GE(w.data(), room.data() + at);
      EXPECT_LE(w.data() + 256, room.data() + at + scratch_bytes(lay_out));
      EXPECT_THROW(Workspace(context, "op", kCPU, 1), DeviceError);  // one call at a time
    }
    EXPECT_THROW(Workspace(context, "op", kCPU, 513), DeviceError);
  }
}

TEST(Dispatch, VisitsTheRightType) {
  EXPECT_EQ(visit_floating(DType::kBF16, []<class T>() { return dtype_of<T>; }), DType::kBF16);
  EXPECT_EQ(visit_bool(true, []<bool B>() { return B; }), true);
  EXPECT_THROW(visit_floating(DType::kI32, []<class T>() {}), InvalidArgument);
}

#ifdef ANNULUS_TEST_DLPACK
TEST(DLPack, ThereAndBack) {
  std::vector<bfloat16> data(24);
  TensorView v = contiguous(data.data(), {2, 3, 4});
  v.stride = {4, 8, 1};
  DLTensor t{};
  to_dlpack(v, t);
  EXPECT_EQ(t.dtype.code, kDLBfloat);
  EXPECT_EQ(t.dtype.bits, 16);
  EXPECT_EQ(t.device.device_type, kDLCPU);
  const TensorView back = from_dlpack(t);
  EXPECT_EQ(back.data, v.data);
  EXPECT_EQ(back.dtype, v.dtype);
  EXPECT_EQ(back.shape, v.shape);
  EXPECT_EQ(back.stride, v.stride);
}

TEST(DLPack, NoStridesMeansRowMajorAndOffsetsCount) {
  std::vector<float> data(24);
  std::array<std::int64_t, 2> shape = {3, 4};
  DLTensor t{};
  t.data = data.data();
  t.byte_offset = 8;
  t.ndim = 2;
  t.shape = shape.data();
  t.dtype = {kDLFloat, 32, 1};
  t.device = {kDLCPU, 0};
  const TensorView v = from_dlpack(t);
  EXPECT_EQ(v.data, data.data() + 2);
  EXPECT_EQ(v.stride[0], 4);
  EXPECT_EQ(v.stride[1], 1);
  const std::function<void()> faults[] = {[&] { t.dtype.bits = 8; },
                                          [&] { t.dtype.lanes = 2; },
                                          [&] { t.device.device_type = kDLOpenCL; },
                                          [&] { t.ndim = 7; },
                                          [&] { shape[1] = -4; },
                                          [&] { shape = {1ll << 40, 1ll << 40}; }};
  for (const auto& spoil : faults) {
    const auto good = t;
    const auto good_shape = shape;
    spoil();
    EXPECT_THROW(from_dlpack(t), InvalidArgument);
    t = good;
    shape = good_shape;
  }
}
#else
TEST(DLPack, Header) { GTEST_SKIP() << "dlpack/dlpack.h was not found: DLPack is not tested"; }
#endif

TEST(Backend, LastOneOfEachOperator) {
  Context context, other;
  EXPECT_EQ(context.last_backend("no_such_operator"), "");
  context.ran_on("backend_test_a", DeviceType::kCPU, "one way");
  context.ran_on("backend_test_b", DeviceType::kCUDA, "another");
  context.ran_on("backend_test_a", DeviceType::kCUDA, "a third");
  EXPECT_EQ(context.last_backend("backend_test_a"), "cuda, a third");
  EXPECT_EQ(context.last_backend("backend_test_b"), "cuda, another");
  EXPECT_EQ(context.backends.size(), 2u);
  EXPECT_EQ(other.last_backend("backend_test_a"), "");  // no Context knows of another's calls
}

TEST(Backend, OperatorsSayWhatTheyRanOn) {
  const testing::Dense x(kCPU, DType::kF32, {1, 1, 3, 4}), theta(kCPU, DType::kF32, {1, 4}),
      y(kCPU, DType::kF32, {1, 1, 3, 8});
  Context context;
  LrpeCosineOptions options;
  options.shape = {3};
  lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
  EXPECT_EQ(context.last_backend("lrpe_cosine"), "cpu, " + cpu_features());
  const testing::Dense states(kCPU, DType::kF32, {2, 3, 5}), angle(kCPU, DType::kF32, {2, 3}),
      amplitude(kCPU, DType::kF32, {2, 3});
  ring_readout_forward(states.view(), angle.view(), amplitude.view(), context);
  EXPECT_EQ(context.last_backend("ring_readout"), "cpu, " + cpu_features());
  // A call that is refused has not run.
  context.ran_on("ring_readout", DeviceType::kCUDA, "before");
  EXPECT_THROW(ring_readout_forward(states.view(), states.view(), amplitude.view(), context),
               InvalidArgument);
  EXPECT_EQ(context.last_backend("ring_readout"), "cuda, before");
}

// --- conversions of the 16-bit types, exhaustively, against arithmetic in double ---------------------

// The value of a 16-bit pattern by the definition of its format, without the library's conversion.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  }
  const int fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias - mantissa_bits);
}

template <class T>
void check_every_pattern(int exponent_bits, int mantissa_bits) {
  for (unsigned u = 0; u < 0x10000; ++u) {
    T v;
    v.bits = static_cast<std::uint16_t>(u);
    const double expected = value_of(v.bits, exponent_bits, mantissa_bits);
    const auto f = static_cast<float>(v);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(f)) << u;
      ASSERT_TRUE(std::isnan(static_cast<float>(T(f)))) << u;
      continue;
    }
    ASSERT_EQ(static_cast<double>(f), expected) << u;
    ASSERT_EQ(T(f).bits, v.bits) << u;  // the round trip is exact
  }
}

// Between two neighbours: below the middle rounds down, above it up, the middle itself to even.
template <class T>
void check_every_rounding(unsigned infinity_bits) {
  for (unsigned u = 0; u + 1 < infinity_bits; ++u) {
    T low, high;
    low.bits = static_cast<std::uint16_t>(u);
    high.bits = static_cast<std::uint16_t>(u + 1);
    const double a = static_cast<double>(static_cast<float>(low));
    const double b = static_cast<double>(static_cast<float>(high));
    const auto middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(static_cast<double>(middle),
              (a + b) / 2);  // representable: the test means what it says
    const std::uint16_t even = u % 2 == 0 ? low.bits : high.bits;
    ASSERT_EQ(T(middle).bits, even) << u;
    ASSERT_EQ(T(-middle).bits, even | 0x8000u) << u;
    ASSERT_EQ(T(std::nextafter(middle, 0.0f)).bits, low.bits) << u;
    ASSERT_EQ(T(std::nextafter(middle, INFINITY)).bits, high.bits) << u;
  }
}

TEST(DType, EveryBfloat16) { check_every_pattern<bfloat16>(8, 7); }
TEST(DType, EveryFloat16) { check_every_pattern<float16>(5, 10); }
TEST(DType, EveryBfloat16Rounding) { check_every_rounding<bfloat16>(0x7f80); }
TEST(DType, EveryFloat16Rounding) { check_every_rounding<float16>(0x7c00); }

TEST(DType, BeyondTheLargest) {
  EXPECT_EQ(float16(65519.0f).bits, 0x7bff);  // below half-way to the next: still the largest
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);  // the tie goes to infinity, which is even
  EXPECT_EQ(float16(1e10f).bits, 0x7c00);
  EXPECT_EQ(float16(-1e10f).bits, 0xfc00);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(float16(std::ldexp(1.0f, -26)).bits, 0);  // below half the smallest subnormal
  EXPECT_EQ(float16(-0.0f).bits, 0x8000);
}

// A NaN whose payload lies in the dropped bits only must not become infinity.
TEST(DType, NanWithALowPayload) {
  const float nan = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(nan))));
  EXPECT_TRUE(std::isnan(static_cast<float>(float16(nan))));
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kBF16), 2);
  EXPECT_EQ(size_of(DType::kI64), 8);
  EXPECT_STREQ(name_of(DType::kF16), "f16");
  EXPECT_TRUE(is_floating(DType::kF64));
  EXPECT_FALSE(is_floating(DType::kBool));
  EXPECT_EQ(dtype_of<bfloat16>, DType::kBF16);
}

}  // namespace
}  // namespace annulus
