// What the files of the runner share: runner_build.cpp sets it up, runner.cpp runs a step, runner_attention.cpp the
// part of it that reads KV blocks.
#pragma once

#include <memory>
#include <vector>

#include "runner.h"

namespace firstlight {

constexpr int kPrivateRows = 2;    // up to this many rows every member prepares the input for itself
constexpr int kSplitTokens = 8;    // rows with at most this many tokens attend one split per unit,
constexpr int kSplitQueries = 96;  // or with at most this many query rows (tokens x heads per KV head)
constexpr int kTileQueries = 48;   // query rows in a tile that walks all splits,
// or, where there are tiles enough for all threads, the most that stay in the L2 cache.
constexpr int kLongTileQueries = 96;

inline size_t floats(int n) { return static_cast<size_t>(n) * sizeof(float); }

// One thread's scratch.
struct Runner::Member {
  int index = 0;
  int phase = 0;  // barriers of this step so far
  PageBuffer acts, row, gemm, query, running, part, attention;
  std::vector<int32_t> first, limit;
  std::unique_ptr<SampleScratch> sampling;
};

}  // namespace firstlight
