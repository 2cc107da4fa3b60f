// How far a long piece of work is, on stderr.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace md {

/// On a terminal one line at the bottom, redrawn, over which log lines scroll; on a pipe a plain line every few
/// seconds. Rate and time left come from recent steps. One thread at a time.
///   train unet  [#####.....]  512/1000  loss 0.1234  0.21 s/step  1:42 left
class ProgressBar {
 public:
  /// `steady`: on a pipe also while no step ends: "caching  0/30  0:20 so far", every `interval`.
  ProgressBar(std::string title, int64_t total, int64_t start = 0, bool steady = false,
              std::chrono::milliseconds interval = std::chrono::seconds(10));
  ~ProgressBar();
  void update(int64_t done, const std::string& text);
  /// Prints the last state as a line that stays, with the time it took.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ProgressState {
  std::string title, text;
  int64_t done = 0, total = 0;
  double seconds_per_step = 0;  // 0: not known yet
  double seconds = 0;           // since the start
  bool ended = false;           // before `total`, perhaps
};
/// The line for a terminal of `width` columns; the bar, then the title, give way where it is narrow. `width` 0: no bar.
std::string progress_line(const ProgressState& state, int64_t width);

}  // namespace md
