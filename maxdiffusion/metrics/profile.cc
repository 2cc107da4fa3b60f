#include "maxdiffusion/metrics/profile.h"

#include <fmt/chrono.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/metrics/xplane.pb.h"
#include "maxdiffusion/pjrt/profiler.h"

namespace md {
namespace {

/// Host threads as the plane that TensorBoard expects. A span "train" with its number is a step.
xplane::XPlane host_plane(const std::vector<TracedThread>& threads) {
  xplane::XPlane plane;
  plane.set_name("/host:CPU");
  constexpr int64_t kStep = 1;
  auto& stat = (*plane.mutable_stat_metadata())[kStep];
  stat.set_id(kStep);
  stat.set_name("step_num");
  std::map<std::string, int64_t> ids;
  for (const TracedThread& t : threads) {
    xplane::XLine& line = *plane.add_lines();
    line.set_id(t.id);
    line.set_name(fmt::format("{}/{}", t.name, t.id));
    int64_t start = std::numeric_limits<int64_t>::max();
    for (const TracedSpan& s : t.spans) start = std::min(start, s.start_ns);
    line.set_timestamp_ns(start);
    std::vector<TracedSpan> spans = t.spans;
    std::sort(spans.begin(), spans.end(), [](const TracedSpan& a, const TracedSpan& b) {
      return a.start_ns != b.start_ns ? a.start_ns < b.start_ns : a.end_ns > b.end_ns;
    });
    for (const TracedSpan& s : spans) {
      const int64_t id = ids.try_emplace(s.name, static_cast<int64_t>(ids.size()) + 1).first->second;
      auto& metadata = (*plane.mutable_event_metadata())[id];
      metadata.set_id(id);
      metadata.set_name(s.name);
      xplane::XEvent& e = *line.add_events();
      e.set_metadata_id(id);
      e.set_offset_ps((s.start_ns - start) * 1000);
      e.set_duration_ps((s.end_ns - s.start_ns) * 1000);
      if (s.number < 0) continue;
      xplane::XStat& number = *e.add_stats();
      number.set_metadata_id(kStep);
      number.set_int64_value(s.number);
    }
  }
  return plane;
}

/// Host threads in Chrome's trace event format.
std::string chrome_trace(const std::vector<TracedThread>& threads) {
  using nlohmann::json;
  json events = json::array();
  int64_t start = std::numeric_limits<int64_t>::max();
  for (const TracedThread& t : threads)
    for (const TracedSpan& s : t.spans) start = std::min(start, s.start_ns);
  events.push_back({{"ph", "M"}, {"pid", 1}, {"name", "process_name"}, {"args", {{"name", "maxdiffusion"}}}});
  for (const TracedThread& t : threads) {
    events.push_back({{"ph", "M"}, {"pid", 1}, {"tid", t.id}, {"name", "thread_name"}, {"args", {{"name", t.name}}}});
    for (const TracedSpan& s : t.spans) {
      json e = {{"ph", "X"},
                {"pid", 1},
                {"tid", t.id},
                {"name", s.name},
                {"ts", static_cast<double>(s.start_ns - start) / 1e3},
                {"dur", static_cast<double>(s.end_ns - s.start_ns) / 1e3}};
      if (s.number >= 0) e["args"] = {{"step_num", s.number}};
      events.push_back(std::move(e));
    }
  }
  return json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump();
}

std::string gzipped(const std::string& text) {
  z_stream z{};
  constexpr int kGzip = 16 + MAX_WBITS, kMemory = 8;
  check(deflateInit2(&z, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kGzip, kMemory, Z_DEFAULT_STRATEGY) == Z_OK, Code::internal,
        "zlib cannot be initialised");
  std::string out(deflateBound(&z, text.size()), '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  const int rc = deflate(&z, Z_FINISH);
  out.resize(z.total_out);
  deflateEnd(&z);
  check(rc == Z_STREAM_END, Code::internal, "zlib could not compress {} bytes", text.size());
  return out;
}

}  // namespace

struct Profile::Impl {
  std::unique_ptr<pjrt::Profiler> plugin;
  bool tracing = true;
};

Profile::Profile(const Devices& devices) : impl_(std::make_unique<Impl>()) {
  impl_->plugin = pjrt::Profiler::start(devices.client());
  start_tracing();
}

Profile::~Profile() {
  if (impl_->tracing) stop_tracing();
}

std::string Profile::write(const std::string& folder) {
  const std::vector<TracedThread> threads = stop_tracing();
  impl_->tracing = false;
  int64_t dropped = 0;
  for (const TracedThread& t : threads) dropped += t.dropped;
  if (dropped > 0) log_warning("profile: {} spans are not recorded: a thread records at most a million", dropped);
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  xplane::XSpace space;
  space.add_hostnames(host);
  *space.add_planes() = host_plane(threads);
  // Concatenated protobuf messages are one message: this adds the plugin's planes.
  std::string bytes = space.SerializeAsString();
  if (impl_->plugin) bytes += impl_->plugin->stop();

  std::string to = fmt::format("{}/plugins/profile/{:%Y_%m_%d_%H_%M_%S}", folder, fmt::localtime(std::time(nullptr)));
  make_folders(to);
  write_file_atomic(fmt::format("{}/{}.xplane.pb", to, host), bytes);
  write_file_atomic(fmt::format("{}/{}.trace.json.gz", to, host), gzipped(chrome_trace(threads)));
  return to;
}

ProfileWindow::ProfileWindow(const Devices& devices, const ProfileConfig& config, std::string folder, int64_t first)
    : devices_(devices), folder_(std::move(folder)) {
  if (!config.enable_profiler) return;
  check(config.skip_first_n_steps_for_profiler >= 0 && config.profiler_steps > 0, Code::invalid_config,
        "enable_profiler with skip_first_n_steps_for_profiler={} and profiler_steps={}: no step is recorded",
        config.skip_first_n_steps_for_profiler, config.profiler_steps);
  begin_ = first + config.skip_first_n_steps_for_profiler;
  end_ = begin_ + config.profiler_steps;
}

void ProfileWindow::before(int64_t step) {
  if (step != begin_) return;
  try {
    profile_ = std::make_unique<Profile>(devices_);
  } catch (const Error& e) {
    log_warning("profile: not written, and training continues: {}", e.what());
  }
}

void ProfileWindow::finish(int64_t done) {
  if (auto profile = std::exchange(profile_, nullptr)) {
    try {
      log_info("profile of steps {} to {}: {}", begin_ + 1, done, profile->write(folder_));
    } catch (const Error& e) {
      log_warning("profile: not written, and training continues: {}", e.what());
    }
  }
}

}  // namespace md
