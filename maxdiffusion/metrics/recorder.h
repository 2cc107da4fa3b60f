// Scalars to the console, to metrics.jsonl and to TensorBoard event files; the progress bar; pictures of curves.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

struct MetricsConfig {
  std::string metrics_file;  // also one JSON object a step here
  bool write_metrics = true;
  int64_t log_period = 100;  // steps between flushes and full lines
  template <class V>
  void visit(V&& v) {
    v("metrics_file", metrics_file, "file that gets one JSON object a step");
    v("write_metrics", write_metrics, "write TensorBoard and metrics.jsonl");
    v("log_period", log_period, "steps between flushes");
  }
};

/// One TensorBoard event file, events.out.tfevents.<time>.<host>. Thread safe.
class EventWriter {
 public:
  explicit EventWriter(const std::string& folder);
  ~EventWriter();
  void scalar(const std::string& tag, double value, int64_t step);
  void text(const std::string& tag, const std::string& value, int64_t step = 0);
  /// rgb: u8 [H, W, 3].
  void image(const std::string& tag, const HostArray& rgb, int64_t step);
  void flush();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One JSON object per line, appended. Opening with `truncate_after` drops lines of later steps (after a resume).
class JsonlWriter {
 public:
  JsonlWriter(const std::string& path, int64_t keep_through_step);
  ~JsonlWriter();
  void write(int64_t step, const std::map<std::string, double>& values, const std::string& run_name);
  void flush();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One line on a terminal, redrawn; on a pipe, a plain line every few seconds. Not thread safe.
///   train unet  [#####.....]  512/1000  loss 0.1234  0.21 s/step  1:42 left
class ProgressBar {
 public:
  ProgressBar(std::string title, int64_t total, int64_t start = 0);
  ~ProgressBar();
  void update(int64_t done, const std::string& text);
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Curve {
  std::string name;
  std::vector<double> x, y;
};
/// A line plot with axes, ticks and a legend, as PNG. `log_y` where all values are positive.
void write_curve_png(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_y = false);

}  // namespace md
