// Metrics of a run: scalars in the progress bar, metrics.jsonl and TensorBoard, and the loss curve at the end. Never
// waits for the devices: reads the values of step n after step n+1 is dispatched.
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
  std::string metrics_file;  // additional JSONL file, one object per step
  bool write_metrics = true, gcs_metrics = false;
  int64_t log_period = 100;  // steps between flushes
  template <class V>
  void visit(V&& v) {
    v("metrics_file", metrics_file,
      "file that gets one JSON object a step: names of metrics.jsonl and TensorBoard's tags", KeyPath::output);
    v("write_metrics", write_metrics, "false: none of the files of metrics is written");
    v("gcs_metrics", gcs_metrics,
      "also write metrics/metrics_step_A_to_step_B.txt, log_period steps each, as MaxDiffusion uploads them");
    v("log_period", log_period, "steps between flushes, and between lines of the log (completed step: …)");
  }
};

struct RecorderOptions {
  std::string folder;  // output_dir/run_name: tensorboard/, metrics.jsonl and loss.png are written there
  std::string run_name;
  std::string title = "train";  // of the progress bar
  int64_t total_steps = 0;
  int64_t start_step = 0;                   // steps done before; later steps in existing files are discarded
  int64_t samples = 0;                      // of one step; 0: unknown
  double device_flops = 0;                  // floating-point operations of one step on one device; 0: unknown
  double later_device_flops = 0;            // those of the run's later stages; 0: none, or unknown
  std::optional<double> device_peak_flops;  // per second
  MetricsConfig config;
  std::string curve = "loss.png";            // empty: no curve
  std::map<std::string, std::string> texts;  // for TensorBoard: tag → Markdown, such as the config
  std::function<void()> flushed;             // called after each flush; may be empty
};

/// Metrics are named scalars. "loss", "grad_norm" and "learning_rate" become TensorBoard's learning/loss,
/// learning/grad_norm and learning/current_learning_rate; another name x becomes learning/x; a name with '/' is
/// unchanged. A step's time, perf/step_time_seconds, is the time between the readings of the previous step and of this
/// one; with device_flops also perf/per_device_tflops, perf/per_device_tflops_per_sec and, if the peak is known,
/// perf/mfu; with samples perf/samples_per_second. Names that begin with eval_loss are plotted at the end, in
/// eval_loss.png. Once per start, when 5 seconds of steps are measured, the log says how long the steps that are left
/// will take and, with later_device_flops, the run's later stages at the same rate. Not thread safe.
class Recorder {
 public:
  using Scalars = std::map<std::string, double>;

  explicit Recorder(RecorderOptions options);
  /// Closes the files without plotting the curve; does not throw. Call finish() first after a successful run.
  ~Recorder();

  /// `step` counts updates done, this one included: start_step + 1, …, total_steps. Starts copying `metrics` (scalars
  /// on the devices) to the host and reads those of the previous push. `known`: host values. Memory in use is added:
  /// perf/host_memory_bytes, perf/device_peak_memory_bytes where the plugin counts. Throws device, naming the step, if
  /// a loss or gradient norm is not finite; it is written first.
  void push(int64_t step, const Devices& devices, const ArrayMap& metrics, const Scalars& known = {});
  void push(int64_t step, std::map<std::string, PendingArray> metrics, const Scalars& known = {});
  /// RecorderOptions::device_flops of later steps, if steps differ.
  void set_device_flops(double flops);
  /// Records host values immediately.
  void record(int64_t step, Scalars values, double step_seconds);
  /// Waits for the metrics of the last push and records them. `extra`: further values of that step, from an evaluation,
  /// whose time is excluded from the step time.
  void read_pending(const std::function<Scalars()>& extra = {});
  /// Reads pending metrics and flushes the files, before a checkpoint.
  void flush();
  /// Excludes the time since the end of the last step (an evaluation, a compilation) from the next step time.
  void restart_clock();
  /// For texts and images of the run. Null if nothing is written.
  EventWriter* events();
  /// Reads the last step, plots the curve, closes the files and the bar.
  void finish();
  /// (step, loss) of this run and of the run that it resumed, by step.
  const Curve& loss() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
