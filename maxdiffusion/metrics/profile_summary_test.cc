#include "maxdiffusion/metrics/profile_summary.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/metrics/xplane.pb.h"

namespace md {
namespace {

/// Adds a line of events, each with its name, start and end in milliseconds.
void add_line(xplane::XPlane& plane, const std::string& name,
              const std::vector<std::tuple<std::string, int64_t, int64_t>>& events) {
  xplane::XLine& line = *plane.add_lines();
  line.set_name(name);
  line.set_timestamp_ns(1'795'813'470'000'000'000);  // since 1970
  for (const auto& [event, begin, end] : events) {
    int64_t id = 1;
    while (plane.event_metadata().contains(id) && plane.event_metadata().at(id).name() != event) ++id;
    (*plane.mutable_event_metadata())[id].set_name(event);
    xplane::XEvent& e = *line.add_events();
    e.set_metadata_id(id);
    e.set_offset_ps(begin * 1'000'000'000);
    e.set_duration_ps((end - begin) * 1'000'000'000);
  }
}

ProfileSummary summary_of(const xplane::XSpace& space) {
  const TemporaryFolder t;
  write_file_atomic(t / "a.xplane.pb", space.SerializeAsString());
  return summarize_profile(t / "a.xplane.pb");
}

TEST(ProfileSummary, HasTheTimesOfADevicesKernelsAndOfSteps) {
  xplane::XSpace space;
  xplane::XPlane& host = *space.add_planes();
  host.set_name("/host:CPU");
  add_line(host, "main",
           {{"train", 0, 4}, {"wait for data", 1, 3}, {"train", 10, 12}, {"train", 20, 23}, {"save", 23, 24}});
  for (const char* name : {"/device:GPU:1", "/device:GPU:0"}) {
    xplane::XPlane& device = *space.add_planes();
    device.set_name(name);
    add_line(device, "Stream #1", {{"dot", 0, 4}, {"copy", 1, 2}, {"dot", 10, 14}, {"add", 15, 16}});
    add_line(device, "XLA Modules", {{"jit_train", 0, 100}});
  }
  const ProfileSummary s = summary_of(space);
  EXPECT_TRUE(s.of_device);
  ASSERT_EQ(s.kernels.size(), 3u);
  EXPECT_EQ(s.kernels[0].name, "dot");
  EXPECT_EQ(s.kernels[0].calls, 2);
  EXPECT_NEAR(s.kernels[0].seconds, 0.007, 1e-9);
  EXPECT_NEAR(s.busy, 0.009, 1e-9);
  EXPECT_NEAR(s.span, 0.016, 1e-9);
  EXPECT_NEAR(s.longest_gap, 0.006, 1e-9);
  EXPECT_EQ(s.steps, 3);
  EXPECT_NEAR(s.step, 0.010, 1e-9);
  EXPECT_NEAR(s.host, 0.002, 1e-9);
  EXPECT_NEAR(s.waited, 0, 1e-9);
}

TEST(ProfileSummary, WithoutADeviceHasTheKernelsOfTheHost) {
  xplane::XSpace space;
  xplane::XPlane& host = *space.add_planes();
  host.set_name("/host:CPU");
  add_line(host, "main", {{"train", 0, 4}, {"convolution", 1, 3}});
  const ProfileSummary s = summary_of(space);
  EXPECT_FALSE(s.of_device);
  ASSERT_EQ(s.kernels.size(), 1u);
  EXPECT_EQ(s.kernels[0].name, "convolution");
  const TemporaryFolder t;
  write_file_atomic(t / "a", "no profile \xff");
  EXPECT_THROW(summarize_profile(t / "a"), Error);
}

}  // namespace
}  // namespace md
