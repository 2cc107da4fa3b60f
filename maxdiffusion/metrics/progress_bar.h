// Progress of a long task on stderr.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace md {

/// On a terminal a status line at the bottom, above which log lines scroll; on a pipe a plain line every few seconds.
/// Rate and remaining time are those of recent steps. Not thread safe.
///   train unet  [#####.....]  512/1000  loss 0.1234  0.21 s/step  1:42 left
class ProgressBar {
 public:
  /// `steady`: on a pipe, also prints while no step ends: "caching 0/30 0:20 so far", every `interval`.
  ProgressBar(std::string title, int64_t total, int64_t start = 0, bool steady = false,
              std::chrono::milliseconds interval = std::chrono::seconds(10));
  ~ProgressBar();
  /// With `done` of the call before, other work ends here: its time does not count in the rate.
  void update(int64_t done, const std::string& text);
  /// Prints the final state as a permanent line, with the elapsed time.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "1:42", "1:02:03", "2d 5h"; "?" where it is not finite.
std::string duration_text(double seconds);

struct ProgressState {
  std::string title, text;
  int64_t done = 0, total = 0;
  double seconds_per_step = 0;  // 0: not known yet
  double seconds = 0;           // since the start
  bool ended = false;           // finished, perhaps before `total`
};
/// The line for a terminal of `width` columns; a narrow terminal omits the bar, then the title. `width` 0: no bar.
std::string progress_line(const ProgressState& state, int64_t width);

}  // namespace md
