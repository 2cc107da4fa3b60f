#include "maxdiffusion/metrics/recorder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/runtime/memory.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char *kHostMemory = "host_memory_bytes", *kDevicePeakMemory = "device_peak_memory_bytes";

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

std::string tag_of(const std::string& name) {
  if (name == "learning_rate") return "learning/current_learning_rate";
  for (const char* perf : {"step_time_seconds", "samples_per_second", "per_device_tflops", "per_device_tflops_per_sec",
                           "mfu", kHostMemory, kDevicePeakMemory})
    if (name == perf) return "perf/" + name;
  return name.find('/') == std::string::npos ? "learning/" + name : name;
}

/// Runs a writer; the first error (a full disk) is logged and closes that writer, and the run continues.
template <class Writer, class F>
void write_or_drop(std::unique_ptr<Writer>& writer, const char* what, F&& f) {
  if (!writer) return;
  try {
    f(*writer);
  } catch (const Error& e) {
    log_warning("{} is closed and training continues: {}", what, e.what());
    writer.reset();
  }
}

/// The line of the log that says how long `left` steps take at this rate, and `later_seconds` of later stages.
std::string estimate_text(const std::string& title, int64_t left, double seconds_per_step, double later_seconds) {
  const double seconds = seconds_per_step * static_cast<double>(left);
  std::string text =
      fmt::format("{}: the {} steps left will take about {} on this machine", title, left, duration_text(seconds));
  if (later_seconds > 0)
    text += fmt::format(", and the stages after it about {}: {} together", duration_text(later_seconds),
                        duration_text(seconds + later_seconds));
  return text;
}

}  // namespace

struct Recorder::Impl {
  RecorderOptions options;
  std::unique_ptr<EventWriter> events;
  std::unique_ptr<JsonlWriter> lines, metrics_file;
  std::unique_ptr<ProgressBar> bar;
  std::map<std::string, Curve> curves = {{"loss", {.name = "loss"}}};  // and each eval_loss…
  Clock::time_point step_began = Clock::now();
  // The step whose metrics are being copied; 0: none.
  int64_t pending_step = 0;
  std::map<std::string, PendingArray> pending;
  Scalars pending_known;
  bool finished = false;
  // Steps of this start that the estimate is made from, without the first, and their time. It is made once.
  int64_t measured_steps = -1;
  double measured_seconds = 0;
  bool estimated = false;
  // MaxDiffusion's metrics batches: the lines of one file.
  std::string batch;
  int64_t batch_start = 0;

  /// Writes the batch if `step` is its last, or the run's last.
  void write_batch(int64_t step, bool last) {
    const int64_t period = options.config.log_period;
    if (batch.empty() || (!last && step % period != 0)) return;
    const std::string text = std::exchange(batch, {});
    make_folders(options.folder + "/metrics");
    write_file_atomic(fmt::format("{}/metrics/metrics_step_{:06}_to_step_{:06}.txt", options.folder, batch_start, step),
                      text);
  }

  void add_to_curves(int64_t step, const Scalars& values) {
    for (const auto& [name, value] : values) {
      if (name != "loss" && !name.starts_with("eval_loss")) continue;
      Curve& c = curves[name];
      c.name = name;
      c.x.push_back(static_cast<double>(step));
      c.y.push_back(value);
    }
  }

  /// Logs how long the run will take, once enough steps are measured.
  void estimate(int64_t step, double step_seconds) {
    constexpr double kEnough = 5;  // seconds
    if (estimated || ++measured_steps == 0) return;
    measured_seconds += step_seconds;
    const int64_t left = options.total_steps - step;
    if (measured_seconds < kEnough || left <= 0) return;
    estimated = true;
    const double seconds = measured_seconds / static_cast<double>(measured_steps);
    const double later = options.device_flops > 0 ? options.later_device_flops / options.device_flops * seconds : 0;
    log_info("{}", estimate_text(options.title, left, seconds, later));
  }

  void flush() {
    write_or_drop(events, "TensorBoard", [](auto& w) { w.flush(); });
    write_or_drop(lines, "metrics.jsonl", [](auto& w) { w.flush(); });
    write_or_drop(metrics_file, "metrics_file", [](auto& w) { w.flush(); });
    if (options.flushed) options.flushed();
  }
};

Recorder::Recorder(RecorderOptions options) : impl_(std::make_unique<Impl>()) {
  Impl& r = *impl_;
  r.options = std::move(options);
  const RecorderOptions& o = r.options;
  check(o.config.log_period > 0, Code::invalid_config, "log_period: {} steps, must be 1 or more", o.config.log_period);
  if (o.config.write_metrics) {
    r.events = std::make_unique<EventWriter>(o.folder + "/tensorboard", o.start_step);
    for (const auto& [tag, text] : o.texts) r.events->text(tag, text);
    r.lines = std::make_unique<JsonlWriter>(o.folder + "/metrics.jsonl", o.start_step);
    for (const auto& [step, values] : r.lines->retained()) r.add_to_curves(step, values);
    if (!o.config.metrics_file.empty())
      r.metrics_file = std::make_unique<JsonlWriter>(o.config.metrics_file, o.start_step);
  }
  r.bar = std::make_unique<ProgressBar>(o.title, o.total_steps, o.start_step);
}

Recorder::~Recorder() = default;

void Recorder::push(int64_t step, const Devices& devices, const ArrayMap& metrics, const Scalars& known) {
  read_pending();
  std::map<std::string, PendingArray> pending;
  for (const auto& [name, array] : metrics) pending.emplace(name, fetch(devices, array));
  Scalars values = known;
  if (impl_->options.config.write_metrics) {
    const MemoryUse memory = memory_use(devices);
    values[kHostMemory] = static_cast<double>(memory.host);
    if (memory.device_peak) values[kDevicePeakMemory] = static_cast<double>(*memory.device_peak);
  }
  push(step, std::move(pending), values);
}

void Recorder::push(int64_t step, std::map<std::string, PendingArray> metrics, const Scalars& known) {
  read_pending();
  impl_->pending_step = step;
  impl_->pending = std::move(metrics);
  impl_->pending_known = known;
}

void Recorder::set_device_flops(double flops) {
  read_pending();
  impl_->options.device_flops = flops;
}

void Recorder::flush() {
  read_pending();
  impl_->flush();
}

void Recorder::read_pending(const std::function<Scalars()>& extra) {
  Impl& r = *impl_;
  if (r.pending_step == 0) return;
  const int64_t step = std::exchange(r.pending_step, 0);
  Scalars values = std::exchange(r.pending_known, {});
  // A step lasts from the end of the one before to its own, not to its reading: a host that takes longer to start a
  // step than the device to compute it reads a result that has long been there.
  auto ended = r.pending.empty() ? Clock::now() : r.step_began;
  for (auto& [name, pending] : std::exchange(r.pending, {})) {
    const HostArray a = pending.wait();
    check(a.shape().elements() == 1, Code::internal, "metric '{}': {} is not a scalar", name, to_string(a.shape()));
    values[name] = a.to_doubles()[0];
    ended = std::max(ended, pending.ended());
  }
  const double seconds = std::max(seconds_between(std::exchange(r.step_began, ended), ended), 1e-9);
  if (extra) {
    values.merge(extra());
    restart_clock();
  }
  record(step, std::move(values), seconds);
}

void Recorder::record(int64_t step, Scalars values, double step_seconds) {
  Impl& r = *impl_;
  values["step_time_seconds"] = step_seconds;
  if (r.options.samples > 0) values["samples_per_second"] = static_cast<double>(r.options.samples) / step_seconds;
  if (const double flops = r.options.device_flops; flops > 0) {
    values["per_device_tflops"] = flops / 1e12;
    values["per_device_tflops_per_sec"] = flops / step_seconds / 1e12;
    if (r.options.device_peak_flops) values["mfu"] = flops / step_seconds / *r.options.device_peak_flops;
  }
  if (r.events) {
    write_or_drop(r.events, "TensorBoard", [&](auto& w) {
      for (const auto& [name, value] : values) w.scalar(tag_of(name), value, step);
    });
  }
  write_or_drop(r.lines, "metrics.jsonl", [&](auto& w) { w.write(step, values, r.options.run_name); });
  write_or_drop(r.metrics_file, "metrics_file", [&](auto& w) {
    Scalars tagged = values;
    for (const auto& [name, value] : values) tagged[tag_of(name)] = value;
    w.write(step, tagged, r.options.run_name);
  });
  if (r.options.config.write_metrics && r.options.config.gcs_metrics) {
    if (r.batch.empty()) r.batch_start = step;
    r.batch += fmt::format("{{\"step\": {}", step);
    for (const auto& [name, value] : values)
      r.batch += std::isfinite(value) ? fmt::format(", \"{}\": {:.9g}", tag_of(name), value)
                                      : fmt::format(", \"{}\": null", tag_of(name));
    r.batch += "}\n";
    r.write_batch(step, step == r.options.total_steps);
  }
  std::string text;
  if (auto loss = values.find("loss"); loss != values.end()) {
    text = fmt::format("loss {:.4f}", loss->second);
  }
  r.add_to_curves(step, values);
  r.estimate(step, step_seconds);
  r.bar->update(step, text);
  for (const char* name : {"loss", "grad_norm"}) {
    auto v = values.find(name);
    if (v == values.end() || std::isfinite(v->second)) continue;
    r.flush();
    throw Error(Code::device, fmt::format("{} is not finite at step {}: {}", name, step, v->second))
        .note("try: a smaller learning_rate, more warm-up steps, a smaller max_grad_norm, or float32 activations");
  }
  const bool due = step % r.options.config.log_period == 0;
  if (auto loss = values.find("loss"); loss != values.end() && (due || step == r.options.total_steps))
    log_info("completed step: {}, seconds: {:.3f}, TFLOP/s/device: {:.3f}, loss: {:.3f}", step, step_seconds,
             r.options.device_flops / step_seconds / 1e12, loss->second);
  if (due) r.flush();
}

void Recorder::restart_clock() { impl_->step_began = Clock::now(); }

EventWriter* Recorder::events() { return impl_->events.get(); }

const Curve& Recorder::loss() const { return impl_->curves.at("loss"); }

void Recorder::finish() {
  Impl& r = *impl_;
  if (std::exchange(r.finished, true)) return;
  read_pending();
  r.bar->finish();
  r.flush();
  const Curve& all = r.curves.at("loss");
  if (!r.options.config.write_metrics || r.options.curve.empty() || all.x.size() < 2) return;
  make_folders(r.options.folder);
  Curve raw = all, smooth = all;
  raw.name.clear();
  raw.faint = true;
  smooth.y = smoothed(raw.y, std::max(1.0, static_cast<double>(raw.y.size()) / 100));
  const auto [low, high] = std::minmax_element(raw.y.begin(), raw.y.end());
  const bool log_y = *low > 0 && *high > 20 * *low;
  write_curve_png(r.options.folder + "/" + r.options.curve, r.options.title, "step", "loss", {raw, smooth}, log_y);

  std::vector<Curve> held_out;
  for (const auto& [name, curve] : r.curves)
    if (name != "loss" && curve.x.size() > 1) held_out.push_back(curve);
  if (!held_out.empty())
    write_curve_png(r.options.folder + "/eval_loss.png", "held-out loss", "step", "loss", held_out, log_y);
}

}  // namespace md
