#include "maxdiffusion/metrics/recorder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::vector<nlohmann::json> out;
  std::ifstream f(path);
  for (std::string line; std::getline(f, line);) out.push_back(parse_json(line));
  return out;
}

TEST(JsonlWriter, KeepsLinesThroughTheStepItResumesFrom) {
  TemporaryFolder t;
  {
    JsonlWriter w(t / "m.jsonl", 0);
    for (int64_t step = 1; step <= 5; ++step) w.write(step, {{"loss", 1.0 / static_cast<double>(step)}}, "a \"run\"");
  }
  std::ofstream(t / "m.jsonl", std::ios::app) << "{\"step\": 6, \"lo";  // truncated by a kill
  {
    JsonlWriter w(t / "m.jsonl", 3);
    EXPECT_EQ(w.retained().size(), 3u);
    EXPECT_EQ(w.retained()[1].first, 2);
    EXPECT_EQ(w.retained()[1].second.at("loss"), 0.5);
    w.write(4, {{"loss", NAN}}, "b");
  }
  auto lines = lines_of(t / "m.jsonl");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0]["run_name"], "a \"run\"");
  EXPECT_EQ(lines[3]["step"], 4);
  EXPECT_TRUE(lines[3]["loss"].is_null());
  JsonlWriter fresh(t / "m.jsonl", 0);
  EXPECT_TRUE(lines_of(t / "m.jsonl").empty());
}

TEST(ProgressBar, PrintsOnAPipeWhileNoStepEnds) {
  testing::internal::CaptureStderr();
  {
    ProgressBar bar("caching", 30, 0, true, std::chrono::milliseconds(50));
    std::this_thread::sleep_for(std::chrono::milliseconds(180));
    bar.update(20, "");
    std::this_thread::sleep_for(std::chrono::milliseconds(80));
    bar.finish();
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.rfind("caching  0/30  0:00 so far\n", 0), 0u) << log;
  EXPECT_NE(log.find("caching  20/30"), log.npos) << log;
  EXPECT_NE(log.find(" left"), log.npos) << log;  // the rate is known by then
  EXPECT_NE(log.find("ended after 0:00\n"), log.npos) << log;
}

TEST(ProgressBar, CountsNoOtherWorkInTheRate) {
  testing::internal::CaptureStderr();
  {
    ProgressBar bar("denoising", 30);
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    bar.update(0, "");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    bar.update(4, "");
  }
  const std::string log = testing::internal::GetCapturedStderr();
  const size_t rate = log.find("4/30  ");
  ASSERT_NE(rate, log.npos) << log;
  EXPECT_LT(std::stod(log.substr(rate + 6)), 95) << log;  // ms/step, of 101 with the work before
  EXPECT_NE(log.find(" ms/step", rate), log.npos) << log;
}

TEST(ProgressLine, FitsTheWidthItIsGiven) {
  ProgressState s{.title = "train unet", .text = "loss 0.1234", .done = 512, .total = 1000, .seconds_per_step = 0.21};
  EXPECT_EQ(progress_line(s, 0), "train unet  512/1000  loss 0.1234  0.210 s/step  1:42 left");
  const std::string wide = progress_line(s, 90);
  EXPECT_EQ(wide.rfind("train unet  [####", 0), 0u) << wide;
  for (int64_t width = 1; width < 200; ++width)
    EXPECT_LT(progress_line(s, width).size(), static_cast<size_t>(width)) << width;
  EXPECT_EQ(progress_line(s, 60).find('['), std::string::npos);
  s.done = 1000, s.seconds = 3723;
  EXPECT_EQ(progress_line(s, 0), "train unet  1000/1000  loss 0.1234  0.210 s/step  in 1:02:03");
  s.done = 700, s.ended = true;
  EXPECT_EQ(progress_line(s, 0), "train unet  700/1000  loss 0.1234  0.210 s/step  ended after 1:02:03");
  s.seconds_per_step = 0.00482;
  EXPECT_NE(progress_line(s, 0).find("4.82 ms/step"), std::string::npos);
}

TEST(NiceTicks, AreRoundAndInside) {
  EXPECT_EQ(axis_ticks(0, 1000, 5), (std::vector<double>{0, 200, 400, 600, 800, 1000}));
  EXPECT_EQ(axis_ticks(0, 0.9, 5).size(), 5u);
  EXPECT_TRUE(axis_ticks(1, 1, 5).empty());
  for (double low : {-3.7, 0.0, 12.34, 1e-6})
    for (double span : {1e-7, 0.013, 1.0, 77.0, 1e6})
      for (double t : axis_ticks(low, low + span, 6)) {
        EXPECT_GE(t, low - 1e-6 * span);
        EXPECT_LE(t, low + span * (1 + 1e-6));
      }
}

TEST(Smoothed, DoesNotLagAndSkipsNan) {
  for (double v : smoothed({3, 3, 3}, 10)) EXPECT_NEAR(v, 3, 1e-12);
  auto s = smoothed({0, NAN, 1}, 5);
  EXPECT_NEAR(s[1], 0.5, 1e-12);
  EXPECT_NEAR(s[0] + s[2], 1, 1e-12);
  EXPECT_LT(s[0], s[2]);
}

TEST(Curve, PlotsEmptyConstantAndBrokenCurves) {
  TemporaryFolder t;
  write_curve_png(t / "a.png", "nothing", "x", "y", {});
  write_curve_png(t / "b.png", "constant", "x", "y", {{.name = "c", .x = {1, 2}, .y = {3, 3}}});
  write_curve_png(t / "c.png", "broken", "x", "y", {{.name = "c", .x = {1, 2, 3}, .y = {1, NAN, INFINITY}}}, true);
  write_curve_png(t / "d.png", "one", "x", "y", {{.name = "c", .x = {1}, .y = {0}}}, true);
  for (const char* f : {"a.png", "b.png", "c.png", "d.png"}) EXPECT_EQ(read_file(t / f).substr(1, 3), "PNG");
}

class RecorderOnDevice : public testing::Test {
 protected:
  ArrayMap step_metrics(float loss) {
    ArrayMap m;
    m.emplace("loss", devices.put(HostArray::of<float>(Shape{DType::f32, {}}, std::vector<float>{loss})));
    m.emplace("grad_norm", devices.put(HostArray::of<float>(Shape{DType::f32, {}}, std::vector<float>{2 * loss})));
    return m;
  }
  RecorderOptions options(int64_t start = 0) {
    return {.folder = t / "run",
            .run_name = "run",
            .title = "train test",
            .total_steps = 6,
            .start_step = start,
            .device_flops = 3e12,
            .device_peak_flops = 1e15,
            .config = {.metrics_file = t / "extra.jsonl"},
            .texts = {{"learning_rate", "1e-3"}}};
  }
  TemporaryFolder t;
  Devices devices = Devices::open();
};

// S2-85, S2-116…119, S4-71, S4-73, S4-104…107
TEST_F(RecorderOnDevice, ReadsOneStepLateAndWritesEverything) {
  using Clock = std::chrono::steady_clock;
  std::chrono::duration<double> most{};
  {
    const auto before = Clock::now();
    Recorder rec(options());
    for (int64_t step = 1; step <= 6; ++step) {
      rec.push(step, devices, step_metrics(1.0f / static_cast<float>(step)), {{"learning_rate", 1e-3}});
      EXPECT_EQ(rec.loss().x.size(), static_cast<size_t>(step - 1));
      if (step == 4) std::this_thread::sleep_for(std::chrono::milliseconds(40));
    }
    rec.finish();
    most = Clock::now() - before;
  }
  auto lines = lines_of(t / "run/metrics.jsonl");
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_EQ(lines[3]["step"], 4);
  EXPECT_FLOAT_EQ(lines[3]["loss"].get<float>(), 0.25f);
  EXPECT_FLOAT_EQ(lines[3]["grad_norm"].get<float>(), 0.5f);
  EXPECT_DOUBLE_EQ(lines[3]["learning_rate"].get<double>(), 1e-3);
  // Steps follow each other, so their times add up to the time until the last ended; the fifth began late.
  double total = 0;
  for (const auto& line : lines) total += line["step_time_seconds"].get<double>();
  const auto time_of = [&](size_t i) { return lines[i]["step_time_seconds"].get<double>(); };
  EXPECT_GE(time_of(3) + time_of(4), 0.039);  // on a busy machine the fourth's end is noted late
  EXPECT_GE(total, 0.04);
  EXPECT_LE(total, most.count() + 1e-6);
  EXPECT_DOUBLE_EQ(lines[3]["per_device_tflops"].get<double>(), 3);
  EXPECT_NEAR(lines[3]["per_device_tflops_per_sec"].get<double>() * lines[3]["step_time_seconds"].get<double>(), 3,
              1e-6);
  EXPECT_NEAR(lines[3]["mfu"].get<double>() * 1e3, lines[3]["per_device_tflops_per_sec"].get<double>(), 1e-6);
  auto tagged = lines_of(t / "extra.jsonl");
  ASSERT_EQ(tagged.size(), 6u);
  for (const char* tag :
       {"learning/loss", "learning/grad_norm", "learning/current_learning_rate", "perf/step_time_seconds",
        "perf/per_device_tflops", "perf/per_device_tflops_per_sec", "perf/mfu", "loss", "learning_rate"})
    EXPECT_TRUE(tagged[0].contains(tag)) << tag;
  EXPECT_TRUE(exists(t / "run/loss.png"));

  // A run resumed from step 4 repeats 5 and 6 and has the losses before.
  Recorder again(options(4));
  EXPECT_EQ(again.loss().x, (std::vector<double>{1, 2, 3, 4}));
  again.push(5, devices, step_metrics(9));
  again.finish();
  EXPECT_EQ(lines_of(t / "run/metrics.jsonl").size(), 5u);
}

// S2-87, S2-119
TEST_F(RecorderOnDevice, MeasuresTheTimeOfAStepAndFlushesEachPeriod) {
  auto o = options();
  o.config.log_period = 2;
  std::vector<size_t> flushed;  // lines in the file then: S2-87
  o.flushed = [&] { flushed.push_back(lines_of(t / "run/metrics.jsonl").size()); };
  const auto start = std::chrono::steady_clock::now();
  Recorder rec(o);
  for (int64_t step = 1; step <= 6; ++step) {
    rec.push(step, devices, step_metrics(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(step == 6 ? 200 : step == 4 ? 60 : 20));
  }
  rec.finish();
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - start;
  ASSERT_GE(flushed.size(), 3u);
  EXPECT_EQ(std::vector<size_t>(flushed.begin(), flushed.begin() + 3), (std::vector<size_t>{2, 4, 6}));
  double sum = 0, slept = 0;  // S2-119
  for (const auto& line : lines_of(t / "run/metrics.jsonl")) {
    const double seconds = line["step_time_seconds"];
    const int64_t step = line["step"];
    EXPECT_LT(seconds, 0.2) << line;  // a step does not last until it is read, of which the last one shows
    sum += seconds;
    EXPECT_GE(sum, slept - 0.002) << line;  // a busy machine notes an end late, which makes the next step shorter
    slept += step == 4 ? 0.06 : 0.02;
  }
  EXPECT_LE(sum, all.count());
}

TEST_F(RecorderOnDevice, SaysOnceHowLongTheRunWillTake) {
  const auto log_of = [&](double later, std::initializer_list<double> seconds) {
    auto o = options();
    o.total_steps = 106, o.later_device_flops = later;
    testing::internal::CaptureStderr();
    {
      Recorder rec(o);
      int64_t step = 0;
      for (const double s : seconds) rec.record(++step, {{"loss", 1}}, s);
    }
    return testing::internal::GetCapturedStderr();
  };
  const auto times = [](const std::string& log, const std::string& text) {
    int n = 0;
    for (size_t at = log.find(text); at != log.npos; at = log.find(text, at + 1)) ++n;
    return n;
  };
  // The first step, of 60 seconds, is not counted; three more make 6 seconds, and 102 of 106 steps are left.
  std::string log = log_of(0, {60, 2, 2, 2, 2, 2, 9});
  EXPECT_EQ(times(log, "train test: the 102 steps left will take about 3:24 on this machine\n"), 1) << log;
  EXPECT_EQ(times(log, "steps left"), 1) << log;
  // A step is 3e12 operations, so 300e12 later ones are 100 of its steps.
  log = log_of(300e12, {60, 2, 2, 2});
  EXPECT_EQ(times(log,
                  "train test: the 102 steps left will take about 3:24 on this machine, and the stages after it about "
                  "3:20: 6:44 together\n"),
            1)
      << log;
  EXPECT_EQ(times(log_of(0, {60, 2, 2}), "steps left"), 0);
}

TEST_F(RecorderOnDevice, StopsAtALossThatIsNotFinite) {
  Recorder rec(options());
  rec.push(1, devices, step_metrics(1));
  rec.push(2, devices, step_metrics(NAN));
  try {
    rec.push(3, devices, step_metrics(1));
    FAIL() << "NaN passed";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::device);
    EXPECT_EQ(e.message(), "loss is not finite at step 2: nan");
  }
  EXPECT_TRUE(lines_of(t / "run/metrics.jsonl").at(1)["loss"].is_null());
}

bool disk_is_full = false;
void full_disk(const std::string& path, size_t) {
  if (disk_is_full) fail(Code::io, "write '{}': No space left on device", path);
}

TEST_F(RecorderOnDevice, OutlivesAFullDisk) {
  set_write_hook(full_disk);
  {
    Recorder rec(options());
    disk_is_full = true;
    rec.push(1, devices, step_metrics(1));
    rec.read_pending();
    EXPECT_EQ(rec.loss().y.size(), 1u);
  }
  disk_is_full = false;
  set_write_hook(nullptr);
}

// S4-71
TEST_F(RecorderOnDevice, WritesNothingIfDisabled) {
  auto o = options();
  o.config.write_metrics = false;
  o.config.gcs_metrics = true;
  o.config.log_period = 1;
  Recorder rec(o);
  for (int64_t step = 1; step <= 6; ++step) rec.push(step, devices, step_metrics(1));
  rec.finish();
  EXPECT_EQ(rec.events(), nullptr);
  EXPECT_FALSE(exists(t / "run"));
  EXPECT_FALSE(exists(t / "extra.jsonl"));
}

// S2-86, S2-87, S4-72, S4-74
TEST_F(RecorderOnDevice, WritesTheMetricsOfMaxDiffusion) {
  auto o = options();
  o.config.gcs_metrics = true;
  o.config.log_period = 4;
  Recorder rec(o);
  // TensorBoard's file is flushed every log_period steps.
  auto shown = [&] {
    const std::string text = read_file(std::filesystem::directory_iterator(t / "run/tensorboard")->path());
    int count = 0;
    for (size_t at = 0; (at = text.find("learning/loss", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  for (int64_t step = 1; step <= 6; ++step) {
    rec.push(step, devices, step_metrics(static_cast<float>(step)));
    EXPECT_EQ(shown(), step <= 4 ? 0 : 4) << step;  // read one step late
  }
  rec.finish();
  EXPECT_EQ(shown(), 6);
  const auto first = lines_of(t / "run/metrics/metrics_step_000001_to_step_000004.txt"),
             rest = lines_of(t / "run/metrics/metrics_step_000005_to_step_000006.txt");
  ASSERT_EQ(first.size(), 4u);
  ASSERT_EQ(rest.size(), 2u);
  EXPECT_EQ(first[2]["step"], 3);
  EXPECT_EQ(first[2]["learning/loss"], 3);
  EXPECT_EQ(rest[1]["learning/grad_norm"], 12);
  o.config.log_period = 0;
  EXPECT_THROW(Recorder{o}, Error);
}

}  // namespace
}  // namespace md
