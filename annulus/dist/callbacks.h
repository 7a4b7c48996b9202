// A link by functions of another language, which can begin to send and to receive and cannot say when it is done: of
// torch.distributed's gloo groups a request is known to be through only to whom waits for it, however long that takes.
//
// Hence every message ends with a mark, the last byte to arrive: where it is seen there is nothing left to wait for.
// What was taken is acknowledged, and with it the sender's request is through as well. A message goes by a tag that is
// its size: gloo ends the process whose receive is smaller than what comes, and so one that is not due never comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "annulus/dist/link.h"

namespace annulus::dist {

// A plain C struct. It and what it points to stay until release() has returned; one thread calls at a time, any thread.
struct LinkCallbacks {
  void* self;  // handed to every function
  std::int32_t rank, size;
  // Begins; messages between two ranks with the same tag keep their order. Returns the request's number, from 1 on, or 0
  // with `why` filled. The memory stays until finish() or release().
  std::int64_t (*send)(void* self, std::int32_t to, std::int32_t tag, const void* data,
                       std::uint64_t bytes);
  std::int64_t (*receive)(void* self, std::int32_t from, std::int32_t tag, void* data,
                          std::uint64_t bytes);
  // The request is through, or will be in a moment: it is waited for and forgotten. 1, or 0 with `why` filled.
  std::int32_t (*finish)(void* self, std::int64_t request);
  // Called now and then while a rank waits or computes. 0: it gives up (Interrupted).
  std::int32_t (*pulse)(void* self);
  // The last call. What is still under way is dropped; no memory of a request is read or written after it.
  void (*release)(void* self);
  char why[200];
};

// Thrown where pulse() says so.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::unique_ptr<Link> callback_link(LinkCallbacks& callbacks);

}  // namespace annulus::dist
