#include "maxdiffusion/metrics/profile_summary.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/median.h"
#include "maxdiffusion/metrics/xplane.pb.h"

namespace md {
namespace {

struct Interval {
  int64_t begin, end;  // picoseconds after the earliest timestamp of the host's lines, or of the device's
  std::string name;
};

bool is_of_host(const xplane::XPlane& plane) { return plane.name().starts_with("/host:"); }

/// The events of a line in order; enclosing events come before those inside. `from`: the earliest timestamp, because
/// picoseconds since 1970 are too many for 64 bits.
std::vector<Interval> events_of(const xplane::XPlane& plane, const xplane::XLine& line, int64_t from) {
  std::vector<Interval> out;
  for (const xplane::XEvent& e : line.events()) {
    const auto it = plane.event_metadata().find(e.metadata_id());
    const int64_t begin = (line.timestamp_ns() - from) * 1000 + e.offset_ps();
    out.push_back({begin, begin + e.duration_ps(), it == plane.event_metadata().end() ? "?" : it->second.name()});
  }
  std::ranges::sort(
      out, [](const Interval& a, const Interval& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  return out;
}

double seconds(int64_t picoseconds) { return static_cast<double>(picoseconds) / 1e12; }

/// Whether a line of a device's plane repeats the kernels of other lines, by step, program or scope.
bool repeats(const std::string& line) {
  for (const char* name :
       {"Steps", "XLA Modules", "XLA TraceMe", "Framework", "Source", "Launch Stats", "XLA Ops Overlay"})
    if (line.find(name) != line.npos) return true;
  return false;
}
/// Whether a span is a wait. Spans of the loop and of waits are not kernels.
bool is_wait(const std::string& name) { return name.starts_with("wait"); }
bool is_kernel_of_host(const std::string& name) {
  return name != "train" && !is_wait(name) && name != "run program" && name != "compile";
}

/// Adds the time of each event without the events inside it.
void add_kernels(const std::vector<Interval>& events, bool host,
                 std::map<std::string, ProfileSummary::Kernel>& kernels) {
  std::vector<std::pair<int64_t, ProfileSummary::Kernel*>> open;  // end, and the kernel whose time is counted
  for (const Interval& e : events) {
    while (!open.empty() && open.back().first <= e.begin) open.pop_back();
    ProfileSummary::Kernel* kernel = nullptr;
    if (!host || is_kernel_of_host(e.name)) {
      kernel = &kernels[e.name];
      ++kernel->calls;
      kernel->seconds += seconds(e.end - e.begin);
    }
    if (!open.empty() && open.back().second) open.back().second->seconds -= seconds(e.end - e.begin);
    open.emplace_back(e.end, kernel);
  }
}

/// Adds step times from the spans "train" of the thread that has them.
void add_steps(const std::vector<Interval>& events, ProfileSummary& s) {
  std::vector<double> between, host, waited;
  const Interval* last = nullptr;
  for (size_t i = 0; i < events.size(); ++i) {
    const Interval& step = events[i];
    if (step.name != "train") continue;
    if (last) between.push_back(seconds(step.begin - last->begin));
    last = &step;
    int64_t waits = 0;
    for (size_t j = i + 1, end_of_wait = 0; j < events.size() && events[j].begin < step.end; ++j)
      if (is_wait(events[j].name) && static_cast<size_t>(events[j].begin) >= end_of_wait) {
        waits += events[j].end - events[j].begin;
        end_of_wait = static_cast<size_t>(events[j].end);
      }
    waited.push_back(seconds(waits));
    host.push_back(seconds(step.end - step.begin - waits));
  }
  if (host.empty()) return;
  s.steps = static_cast<int64_t>(host.size());
  s.step = median(between), s.host = median(host), s.waited = median(waited);
}

}  // namespace

ProfileSummary summarize_profile(const std::string& file) {
  xplane::XSpace space;
  check(space.ParseFromString(read_file(file)), Code::io, "'{}' is no profile", file);
  ProfileSummary s;
  const xplane::XPlane* device = nullptr;
  int64_t from[2] = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};  // devices, host
  for (const xplane::XPlane& plane : space.planes()) {
    for (const xplane::XLine& line : plane.lines())
      if (int64_t& earliest = from[is_of_host(plane)]; line.events_size() > 0)
        earliest = std::min(earliest, line.timestamp_ns());
    const bool of_device = plane.name().find("/device:") != std::string::npos && plane.lines_size() > 0;
    if (of_device && (!device || plane.name() < device->name())) device = &plane;
  }
  s.of_device = device != nullptr;
  std::map<std::string, ProfileSummary::Kernel> kernels;
  std::vector<Interval> all;
  for (const xplane::XPlane& plane : space.planes())
    for (const xplane::XLine& line : plane.lines()) {
      const bool host = is_of_host(plane);
      if (!host && &plane != device) continue;
      const std::vector<Interval> events = events_of(plane, line, from[host]);
      if (host) add_steps(events, s);
      if (host == s.of_device || (!host && repeats(line.name()))) continue;
      add_kernels(events, host, kernels);
      for (const Interval& e : events)
        if (!host || is_kernel_of_host(e.name)) all.push_back(e);
    }
  for (auto& [name, kernel] : kernels) {
    kernel.name = name;
    s.kernels.push_back(kernel);
  }
  std::ranges::stable_sort(s.kernels, std::greater(), &ProfileSummary::Kernel::seconds);
  if (all.empty()) return s;
  std::ranges::sort(all, {}, &Interval::begin);
  int64_t end = all[0].begin, busy = 0, gap = 0;
  for (const Interval& e : all) {
    gap = std::max(gap, e.begin - end);
    busy += std::max<int64_t>(0, e.end - std::max(e.begin, end));
    end = std::max(end, e.end);
  }
  s.busy = seconds(busy), s.span = seconds(end - all[0].begin), s.longest_gap = seconds(gap);
  return s;
}

}  // namespace md
