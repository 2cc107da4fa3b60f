// What a run says about itself: scalars to the progress bar, to metrics.jsonl and to TensorBoard, and the curve of its
// loss at the end. The devices are never waited for: values of step n are read when step n+1 has been started.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/metrics/curve.h"
#include "maxdiffusion/metrics/event_writer.h"
#include "maxdiffusion/metrics/jsonl_writer.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct MetricsConfig {
  std::string metrics_file;  // also one JSON object a step here
  bool write_metrics = true, gcs_metrics = false;
  int64_t log_period = 100;  // steps between flushes
  template <class V>
  void visit(V&& v) {
    v("metrics_file", metrics_file,
      "file that gets one JSON object a step: names of metrics.jsonl and TensorBoard's tags", KeyPath::output);
    v("write_metrics", write_metrics, "false: none of the files of metrics is written");
    v("gcs_metrics", gcs_metrics,
      "also metrics/metrics_step_A_to_step_B.txt, log_period steps each, as the reference uploads");
    v("log_period", log_period, "steps between flushes, and between lines of the log (completed step: …)");
  }
};

struct RecorderOptions {
  std::string folder;  // output_dir/run_name: gets tensorboard/, metrics.jsonl, loss.png
  std::string run_name;
  std::string title = "train";  // of the progress bar
  int64_t total_steps = 0;
  int64_t start_step = 0;                   // steps done before; what the files hold of later ones is dropped
  double device_flops = 0;                  // floating-point operations of one step on one device; 0: not known
  std::optional<double> device_peak_flops;  // a second
  MetricsConfig config;
  std::string curve = "loss.png";            // empty: none is drawn
  std::map<std::string, std::string> texts;  // for TensorBoard: tag → Markdown, such as the config
  std::function<void()> flushed;             // called when the files have what was recorded; may be empty
};

/// Metrics are named scalars. "loss", "grad_norm" and "learning_rate" become TensorBoard's learning/loss,
/// learning/grad_norm and learning/current_learning_rate; any other name x becomes learning/x, a name with '/' stays.
/// A step's time, perf/step_time_seconds, runs from the reading of the step before it to its own; with device_flops
/// there are perf/per_device_tflops, perf/per_device_tflops_per_sec and, where the peak is known, perf/mfu beside it.
/// Names that begin with eval_loss are drawn together at the end, in eval_loss.png.
/// Not thread safe.
class Recorder {
 public:
  using Scalars = std::map<std::string, double>;

  explicit Recorder(RecorderOptions options);
  /// Closes the files without drawing the curve; throws nothing. A run that succeeds calls finish() before.
  ~Recorder();

  /// `step` counts updates done, this one included: start_step + 1, …, total_steps. Starts copying `metrics` (scalars
  /// on the devices) to the host and reads those of the previous push. `known`: values the host has. Throws device,
  /// naming the step, when a loss or a gradient norm read is not finite; the files then hold it.
  void push(int64_t step, const Devices& devices, const ArrayMap& metrics, const Scalars& known = {});
  void push(int64_t step, std::map<std::string, PendingArray> metrics, const Scalars& known = {});
  /// RecorderOptions::device_flops of the steps pushed from now on, where steps differ.
  void set_device_flops(double flops);
  /// Values that the host has, at once.
  void record(int64_t step, Scalars values, double step_seconds);
  /// Waits for the metrics of the last push and records them. `more`: further values of that step, from an evaluation;
  /// the time it takes does not count as the step's.
  void read_pending(const std::function<Scalars()>& more = {});
  /// Reads what is pending and writes it to the files, so that metrics of steps before a checkpoint are not lost with
  /// the process.
  void flush();
  /// Keeps the time since the last reading (an evaluation, a compilation) out of the next step's time.
  void restart_clock();
  /// For texts and images of the run. Null where nothing is written.
  EventWriter* events();
  /// Reads the last step, draws the curve, closes the files and the bar.
  void finish();
  /// (step, loss) of this run and of what it resumed, by step.
  const Curve& loss() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
