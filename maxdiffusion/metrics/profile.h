// Profiles of some steps of a run: spans of host threads, and the plugin's device profile.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct ProfileConfig {
  bool enable_profiler = false;
  int64_t skip_first_n_steps_for_profiler = 5, profiler_steps = 10;
  template <class V>
  void visit(V&& v) {
    v("enable_profiler", enable_profiler, "record a profile of some steps, for TensorBoard and Perfetto");
    v("skip_first_n_steps_for_profiler", skip_first_n_steps_for_profiler, "steps of this start before the profile");
    v("profiler_steps", profiler_steps, "steps in the profile");
  }
};

/// Records from construction to write(). Only one at a time in a process.
class Profile {
 public:
  /// Throws device on an error of the plugin.
  explicit Profile(const Devices& devices);
  ~Profile();
  /// Writes `folder`/plugins/profile/TIME/HOST.xplane.pb, which TensorBoard's profile plugin reads when `folder` is
  /// its log folder, and HOST.trace.json.gz, which Perfetto and chrome://tracing read (host threads only). Wait for
  /// the devices first. Returns the folder of both files. Throws io.
  std::string write(const std::string& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The profile of a loop's steps. A failure is logged and ends the profile, not the run.
class ProfileWindow {
 public:
  /// `first`: the loop's first step. Throws invalid_config for negative or empty ranges of steps.
  ProfileWindow(const Devices& devices, const ProfileConfig& config, std::string folder, int64_t first);
  /// Call before step `step` is dispatched.
  void before(int64_t step);
  /// Whether the profile ends after `done` dispatched steps.
  bool ends(int64_t done) const { return profile_ && done >= end_; }
  bool open() const { return profile_ != nullptr; }
  /// Writes the profile. Wait for the devices first.
  void finish(int64_t done);

 private:
  const Devices& devices_;
  std::string folder_;
  int64_t begin_ = -1, end_ = -1;
  std::unique_ptr<Profile> profile_;
};

}  // namespace md
