// Communicators over NCCL. One rank, on the first GPU, sends to itself by the same way as to another; several, as threads, run
// where NCCL takes them: it wants a GPU for each. What cannot run here says why.
#include "annulus/dist/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "annulus/cuda/memory.h"
#include "annulus/dist/test/schedule.h"

namespace annulus::dist::testing {
namespace {

constexpr int kDevice = 0;

// Memory of a device, with values of the host.
class OnDevice {
 public:
  explicit OnDevice(const std::vector<float>& values, int device = kDevice)
      : device_(device), count_(values.size()), memory_(cuda::allocate(bytes() + 1, device)) {
    if (memory_ == nullptr) throw DeviceError("no memory for a test");
    set(values);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cuda::free(memory_, device_); }

  void* data() const { return memory_; }
  std::size_t bytes() const { return count_ * sizeof(float); }
  void set(const std::vector<float>& values) {
    cuda::copy(memory_, values.data(), bytes());
    cuda::synchronize(device_);
  }
  std::vector<float> values() const {
    std::vector<float> values(count_);
    cuda::copy(values.data(), memory_, bytes());
    return values;
  }

 private:
  int device_;
  std::size_t count_;
  void* memory_;
};

std::vector<float> zeros(std::size_t n) { return std::vector<float>(n); }
std::vector<float> counted(std::size_t n, float first) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), first);
  return values;
}

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no GPU: " << why;
  }
  static std::unique_ptr<Communicator> alone(const CommunicatorOptions& options = {
                                                 .deadline_s = 30}) {
    return nccl_communicator(nccl_unique_id(), 0, 1, kDevice, options);
  }
};

TEST_F(Nccl, OneRankMeetsGathersAndAdds) {
  auto ring = alone();
  EXPECT_EQ(ring->rank(), 0);
  EXPECT_EQ(ring->size(), 1);
  EXPECT_TRUE(ring->sends_device_memory());
  ring->agree("ring", "T 1024, D 64");
  ring->agree("ring", std::string(1000, 'x'));
  ring->barrier();
  for (const std::size_t n : {0U, 1U, 1000U}) {
    const std::vector<float> mine = counted(n, 3);
    std::vector<float> all(n, -1.F), sum = mine;
    ring->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
    EXPECT_EQ(all, mine);
    ring->all_reduce(std::span(sum));
    EXPECT_EQ(sum, mine);
  }
  double x = 0.1;
  ring->all_reduce(std::span(&x, 1));
  EXPECT_EQ(x, 0.1);
  EXPECT_EQ(ring->traffic().bytes, 0U);
}

TEST_F(Nccl, HandsBuffersOfTheDeviceAround) {
  for (const bool checksum : {false, true}) {
    auto ring = alone({.deadline_s = 30, .checksum = checksum});
    for (const std::size_t n : {0U, 1U, 1000U, 1U << 20}) {
      const std::vector<float> k = counted(n, 1), v = counted(n + 3, 2);
      OnDevice k_now(k), v_now(v), k_next(zeros(n)), v_next(zeros(n + 3));
      const Part parts[] = {{k_now.data(), k_now.bytes(), k_next.data(), k_next.bytes()},
                            {v_now.data(), v_now.bytes(), v_next.data(), v_next.bytes()}};
      auto transfer = ring->shift({.op = "rotate", .hop = 2}, parts);
      k_now.set(std::vector<float>(n, -1.F));  // send buffers may be used again at once
      transfer->receive();
      transfer->wait();
      transfer->wait();
      EXPECT_EQ(k_next.values(), k);
      EXPECT_EQ(v_next.values(), v);
    }
  }
}

TEST_F(Nccl, HandsBuffersOfTheHostAround) {
  auto ring = alone();
  for (const std::size_t length : {0U, 1U, 1000U}) Schedule(*ring, length).run();
}

TEST_F(Nccl, SeveralTransfersAtOnceAreTakenInAnyOrder) {
  auto ring = alone();
  constexpr std::size_t kTransfers = 20;
  std::vector<std::unique_ptr<OnDevice>> from, to;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (std::size_t i = 0; i < kTransfers; ++i) {
    from.push_back(std::make_unique<OnDevice>(counted(100 * i, static_cast<float>(i))));
    to.push_back(std::make_unique<OnDevice>(zeros(100 * i)));
    const Part part{from[i]->data(), from[i]->bytes(), to[i]->data(), to[i]->bytes()};
    transfers.push_back(ring->shift({.op = "all", .hop = static_cast<int>(i)}, {&part, 1}));
  }
  transfers[7].reset();  // given up
  for (std::size_t i = kTransfers; i-- > 0;) {
    if (i != 7) transfers[i]->wait();
  }
  ring->barrier();
  for (std::size_t i = 0; i < kTransfers; ++i) {
    EXPECT_EQ(to[i]->values(), i == 7 ? zeros(700) : from[i]->values()) << i;
  }
}

TEST_F(Nccl, NobodyAndItselfAsPeers) {
  auto ring = alone();
  std::byte a[4]{}, b[8]{};
  const Part part{a, 4, b, 4}, uneven{a, 4, b, 8};
  ring->shift({.op = "x", .to = Hop::kNobody, .from = Hop::kNobody}, {&part, 1})->wait();
  for (const int named : {0, 1, 7, -3}) {
    EXPECT_THROW(ring->shift({.op = "x", .to = named}, {&part, 1}), InvalidArgument) << named;
    EXPECT_THROW(ring->shift({.op = "x", .from = named}, {&part, 1}), InvalidArgument) << named;
  }
  EXPECT_THROW(ring->shift({.op = "x", .to = Hop::kNobody}, {&part, 1}), InvalidArgument);
  EXPECT_THROW(ring->shift({.op = "x", .from = Hop::kNobody}, {&part, 1}), InvalidArgument);
  EXPECT_THROW(ring->shift({.op = "x"}, {&uneven, 1}), InvalidArgument);
  EXPECT_THROW(ring->all_gather(a, b), InvalidArgument);
  ring->barrier();  // none of them did it any harm
}

TEST_F(Nccl, BadCallsAreRefused) {
  const NcclId id{};
  EXPECT_THROW(nccl_communicator(id, 0, 0, kDevice), InvalidArgument);
  EXPECT_THROW(nccl_communicator(id, 1, 1, kDevice), InvalidArgument);
  EXPECT_THROW(nccl_communicator(id, -1, 1, kDevice), InvalidArgument);
  EXPECT_THROW(nccl_communicator(id, 0, 1, -1), InvalidArgument);
  EXPECT_THROW(nccl_communicator(id, 0, 1, cuda::device_count()), InvalidArgument);
  for (const double deadline : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(nccl_communicator(id, 0, 1, kDevice, {.deadline_s = deadline}), InvalidArgument);
  }
  auto ring = alone();
  EXPECT_EQ(ring->deadline_s(), 30);
  ring->set_deadline_s(7);
  EXPECT_EQ(ring->deadline_s(), 7);
  EXPECT_THROW(ring->set_deadline_s(0), InvalidArgument);
  ring->barrier();
}

// The others never come: the deadline ends it.
TEST_F(Nccl, MakingOneWaitsNoLongerThanItsDeadline) {
  alone()->barrier();  // the first use of the device takes its time
  const auto start = std::chrono::steady_clock::now();
  try {
    nccl_communicator(nccl_unique_id(), 0, 2, kDevice, {.deadline_s = 1});
    FAIL() << "made of one of two";
  } catch (const RankLost& e) {
    EXPECT_EQ(e.rank, -1) << e.what();
    EXPECT_EQ(e.hop, -1);
    EXPECT_GE(e.waited_s, 0.9);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 2);
  alone()->barrier();
}

TEST_F(Nccl, OneThatIsAbandonedIsClosedAndSaysSo) {
  auto ring = alone();
  OnDevice from(counted(1000, 0)), to(zeros(1000));
  const Part part{from.data(), from.bytes(), to.data(), to.bytes()};
  auto under_way = ring->shift({.op = "rotate", .hop = 3}, {&part, 1});
  ring->abandon("out of memory");
  const std::function<void()> calls[] = {
      [&] { under_way->wait(); },
      [&] {
        ring->shift({.op = "rotate"}, {&part, 1});
      },
      [&] { ring->agree("ring", ""); },
      [&] { ring->barrier(); },
      [&] {
        ring->abandon("again");
        ring->barrier();
      },
  };
  for (const auto& call : calls) {
    try {
      call();
      ADD_FAILURE() << "still open";
    } catch (const RankLost& e) {
      EXPECT_EQ(e.rank, 0);
      EXPECT_EQ(e.hop, 3);
      const std::string what = e.what();
      EXPECT_EQ(what.rfind("the communicator is closed: ", 0), 0U) << what;
      EXPECT_NE(what.find("it gave up: out of memory"), std::string::npos) << what;
    }
  }
  under_way.reset();
  ring.reset();
  alone()->barrier();  // a new one works
}

// --- several ranks, as threads ---

class NcclRanks : public Nccl {
 protected:
  // f(communicator, device) on a thread for each rank; the first error of each, empty where there was none.
  std::vector<std::string> on_all(int size, const CommunicatorOptions& options,
                                  const std::function<void(Communicator&, int)>& f) {
    std::vector<std::string> errors(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    const NcclId id = nccl_unique_id();
    const int devices = cuda::device_count();
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        std::string& error = errors[static_cast<std::size_t>(r)];
        try {
          auto ring = nccl_communicator(id, r, size, r % devices, options);
          f(*ring, r % devices);
        } catch (const NotSupported& e) {
          error = std::string("NotSupported: ") + e.what();
        } catch (const std::exception& e) {
          error = e.what();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    return errors;
  }
  static bool refused(const std::vector<std::string>& errors) {
    for (const std::string& e : errors) {
      if (e.rfind("NotSupported: ", 0) != 0) return false;
    }
    return true;
  }
};

TEST_F(NcclRanks, HandBuffersAroundAndAddInOrder) {
  const int P = std::max(2, std::min(4, cuda::device_count()));
  const auto errors = on_all(P, {.deadline_s = 30}, [&](Communicator& c, int device) {
    for (const std::size_t length : {0U, 1U, 1000U}) Schedule(c, length).run();
    const auto mine = counted(5000, static_cast<float>(c.rank()));
    OnDevice from(mine, device), to(zeros(5000), device);
    const Part part{from.data(), from.bytes(), to.data(), to.bytes()};
    c.shift({.op = "rotate"}, {&part, 1})->wait();
    if (to.values() != counted(5000, static_cast<float>((c.rank() + P - 1) % P))) {
      throw std::logic_error("another rank's");
    }
    std::vector<float> sum(97, static_cast<float>(c.rank()));
    c.all_reduce(std::span(sum));
    if (sum != std::vector<float>(97, static_cast<float>(P * (P - 1) / 2))) {
      throw std::logic_error("sum");
    }
    c.barrier();
  });
  if (refused(errors)) GTEST_SKIP() << errors[0];
  for (const std::string& e : errors) EXPECT_EQ(e, "");
}

TEST_F(NcclRanks, OneThatDiffersIsNamedAndOneThatIsGoneIsLost) {
  auto errors = on_all(2, {.deadline_s = 10}, [](Communicator& c, int) {
    c.agree("ring", c.rank() == 1 ? "D 32" : "D 64");
  });
  if (refused(errors)) GTEST_SKIP() << errors[0];
  for (const std::string& e : errors) EXPECT_NE(e.find("rank 1"), std::string::npos) << e;
  errors = on_all(2, {.deadline_s = 2}, [](Communicator& c, int) {
    float x = 0, y = 0;
    const Part part{&x, sizeof x, &y, sizeof y};
    if (c.rank() == 1) {
      c.abandon("out of memory");
      c.barrier();
    }
    c.shift({.op = "rotate", .hop = 5}, {&part, 1})->wait();
  });
  EXPECT_NE(errors[0].find("[rotate] rank 1 is lost at hop 5"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("it gave up: out of memory"), std::string::npos) << errors[1];
}

}  // namespace
}  // namespace annulus::dist::testing
