#include "maxdiffusion/metrics/progress_bar.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "maxdiffusion/base/log.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTerminalInterval = 0.1;  // seconds between lines
constexpr double kWindow = 30;             // seconds of steps that count as recent
constexpr int64_t kWidestBar = 40, kNarrowestBar = 5;

std::string rate_text(double seconds_per_step) {
  if (seconds_per_step >= 0.0995) return fmt::format("{:#.3g} s/step", seconds_per_step);
  return fmt::format("{:#.3g} ms/step", seconds_per_step * 1e3);
}

int64_t terminal_width() {
  winsize w{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

/// Columns of UTF-8 text; every code point counts as one.
int64_t columns(const std::string& utf8) {
  return std::count_if(utf8.begin(), utf8.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  auto s = static_cast<int64_t>(std::llround(std::max(seconds, 0.0)));
  if (s >= 86400) return fmt::format("{}d {}h", s / 86400, s % 86400 / 3600);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s % 3600 / 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string progress_line(const ProgressState& s, int64_t width) {
  std::string tail = fmt::format("{}/{}", s.done, s.total);
  if (!s.text.empty()) tail += "  " + s.text;
  if (s.seconds_per_step > 0) {
    tail += "  " + rate_text(s.seconds_per_step);
    if (s.done < s.total && !s.ended)
      tail += fmt::format("  {} left", duration_text(s.seconds_per_step * static_cast<double>(s.total - s.done)));
  }
  if (s.done >= s.total)
    tail += fmt::format("  in {}", duration_text(s.seconds));
  else if (s.ended)
    tail += fmt::format("  ended after {}", duration_text(s.seconds));
  if (width <= 0) return s.title + "  " + tail;
  const int64_t room = width - 1 - columns(tail) - columns(s.title) - 2;  // the last column stays free: no wrap
  if (room < 0)
    return columns(tail) < width ? tail : tail.substr(0, static_cast<size_t>(std::max<int64_t>(width - 1, 0)));
  const int64_t bar = std::min(room - 4, kWidestBar);
  if (bar < kNarrowestBar) return s.title + "  " + tail;
  const double share = s.total > 0 ? static_cast<double>(s.done) / static_cast<double>(s.total) : 1;
  const auto full = static_cast<size_t>(std::lround(std::clamp(share, 0.0, 1.0) * static_cast<double>(bar)));
  return fmt::format("{}  [{}{}]  {}", s.title, std::string(full, '#'),
                     std::string(static_cast<size_t>(bar) - full, '.'), tail);
}

struct ProgressBar::Impl {
  ProgressState state;
  bool terminal = ::isatty(STDERR_FILENO) != 0;
  double interval = 0;  // seconds between lines
  bool finished = false;
  Clock::time_point began = Clock::now();
  double printed_at = 0;                          // seconds after `began`
  std::deque<std::pair<double, int64_t>> recent;  // (seconds after `began`, steps done)
  std::mutex mutex;                               // guards all members if there is a thread
  std::condition_variable_any ended;
  std::jthread steady;

  double seconds() const { return std::chrono::duration<double>(Clock::now() - began).count(); }

  /// Prints the elapsed time while no step ends.
  void keep_saying(const std::stop_token& stop) {
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, stop, std::chrono::duration<double>(printed_at + interval - seconds()),
                           [&] { return stop.stop_requested(); })) {
      if (stop.stop_requested()) return;
      const double now = seconds();
      if (now - printed_at < interval) continue;
      printed_at = now;
      ProgressState so_far = state;
      so_far.text += fmt::format("{}{} so far", so_far.text.empty() ? "" : "  ", duration_text(now));
      print_line(progress_line(so_far, 0));
    }
  }
};

ProgressBar::ProgressBar(std::string title, int64_t total, int64_t start, bool steady,
                         std::chrono::milliseconds interval)
    : impl_(std::make_unique<Impl>()) {
  Impl& p = *impl_;
  p.state = {.title = std::move(title), .done = start, .total = total};
  p.recent.emplace_back(0, start);
  p.finished = !logs(LogLevel::info);  // silent
  p.interval = p.terminal ? kTerminalInterval : std::chrono::duration<double>(interval).count();
  if (p.terminal && !p.finished) set_status_line(progress_line(p.state, terminal_width()));
  if (steady && !p.terminal && !p.finished)
    p.steady = std::jthread([&p](const std::stop_token& stop) { p.keep_saying(stop); });
}

ProgressBar::~ProgressBar() { finish(); }

void ProgressBar::update(int64_t done, const std::string& text) {
  Impl& p = *impl_;
  const std::lock_guard lock(p.mutex);
  if (p.finished) return;
  const double now = p.seconds();
  p.state.done = done;
  p.state.seconds = now;
  if (const auto [last, before] = p.recent.back(); done == before)
    for (auto& [seconds, step] : p.recent) seconds += now - last;
  p.recent.emplace_back(now, done);
  while (p.recent.size() > 2 && now - p.recent[1].first > kWindow) p.recent.pop_front();
  if (auto [since, from] = p.recent.front(); done > from)
    p.state.seconds_per_step = (now - since) / static_cast<double>(done - from);
  p.state.text = text;
  if (now - p.printed_at < p.interval) return;
  p.printed_at = now;
  if (p.terminal) {
    set_status_line(progress_line(p.state, terminal_width()));
  } else {
    print_line(progress_line(p.state, 0));
  }
}

void ProgressBar::finish() {
  Impl& p = *impl_;
  if (p.steady.joinable()) {
    p.steady.request_stop();
    p.steady.join();
  }
  if (std::exchange(p.finished, true)) return;
  set_status_line("");
  p.state.seconds = p.seconds();
  p.state.ended = true;
  if (auto [since, from] = p.recent.front(); p.state.done > from) print_line(progress_line(p.state, 0));
}

}  // namespace md
