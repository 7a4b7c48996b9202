// What `annulus plan ring` found out, and its page.
#pragma once

#include <string>
#include <vector>

#include "annulus/ring_attention/ring_attention_plan.h"

namespace annulus::cli {

struct PlannedRing {
  RingPlanProblem problem;
  RingPlan plan;
};

// "12.3 GB" of decimal units, as links are counted; "12.3 GiB"; "12.3 TFLOP"; "12.3 ms"; "1 000 000".
std::string traffic_label(double bytes);
std::string memory_label(double bytes);
std::string work_label(double flops);
std::string time_label(double seconds);
std::string count_label(std::int64_t n);
// "yes", or how many hops, and from how many tokens a rank on all of them.
std::string hides_label(const RingPassPlan& pass);
// The words of a problem, but for its tokens and ranks.
std::string words_of(const RingPlanProblem& problem);

// One self-contained page: bytes, time and memory of a rank over the number of ranks, for every number of tokens.
std::string plan_page(const std::vector<PlannedRing>& rings);

// The same of an example, a million tokens of a model over up to 64 ranks, for a page about something else.
std::string plan_example();

}  // namespace annulus::cli
