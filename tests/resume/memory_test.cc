// Memory of a run while it saves and resumes, measured with a model whose state is so large that a second copy would
// show.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/runtime/memory.h"
#include "tests/resume/training.h"

namespace md {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// 28 M parameters: 340 MB with moments.
void make_wide(TinyRun& run) {
  run.task.family = tiny_family("[64, 384]");
  run.options.step.ema_decay = 0;
  run.options.keys.checkpoint_every = 8;  // samples: every second step
}

int64_t state_bytes(const LoopView& v) {
  int64_t bytes = 0;
  for (const auto& [name, a] : v.state.arrays) bytes += a.shape().bytes();
  return bytes;
}

/// Peak memory growth of this process since begin().
class Growth {
 public:
  void begin() {
    std::ofstream("/proc/self/clear_refs") << "5";  // resets VmHWM
    before_ = status_bytes("VmRSS");
  }
  int64_t end() const { return status_bytes("VmHWM") - before_; }

 private:
  int64_t before_ = 0;
};

/// Limits the memory that this process may map to `bytes` more than it has now; negative: no limit.
void limit_memory(int64_t bytes) {
  rlimit space{};
  getrlimit(RLIMIT_AS, &space);
  space.rlim_cur = bytes < 0 ? space.rlim_max : static_cast<rlim_t>(status_bytes("VmSize") + bytes);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &space), 0);
}

/// Trains two steps and saves, within 1/20 of the state's size in addition to a step's memory; dies in the third step.
void save_and_die(const std::string& folder) {
  TinyRun run;
  make_wide(run);
  run.options.folder = folder;
  Growth growth;
  int64_t state = 0;
  run.options.hooks = {{every_steps(2),
                        [&](LoopView& v) {
                          v.recorder.flush();
                          state = state_bytes(v);
                          return_freed_memory();
                          constexpr int64_t kStacks = 64 * kMiB;  // address space for new threads
                          limit_memory(v.programs.program(0).memory()->temporary + state / 20 + kStacks);
                          growth.begin();
                        }},
                       {every_steps(2),
                        [&](LoopView&) {
                          limit_memory(-1);  // threads of later steps need address space
                          fmt::print(stderr, "state {} MiB, saved with {} MiB\n", state / kMiB, growth.end() / kMiB);
                          if (state < 200 * kMiB || growth.end() > state / 20) std::_Exit(1);
                        },
                        true},
                       {every_steps(3), [&](LoopView& v) {
                          v.recorder.flush();
                          std::raise(SIGKILL);
                        }}};
  run.train(4);
}

TEST(Memory, ASaveNeedsATwentiethMoreThanTheStepAndResumesToTheBit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  TemporaryFolder folder;
  if (!std::getenv("MD_SAVED_IN")) setenv("MD_SAVED_IN", folder.path().c_str(), 1);
  const std::string saved = std::getenv("MD_SAVED_IN");  // set in the process that dies, which also starts this test
  EXPECT_EXIT(save_and_die(saved), testing::KilledBySignal(SIGKILL),
              "checkpoints pause training while they are written");
  unsetenv("MD_SAVED_IN");

  TinyRun whole, parts;
  make_wide(whole);
  make_wide(parts);
  whole.options.keys.save_final_checkpoint = false;
  const Trained expected = whole.train(4);
  parts.options.folder = saved;
  parts.options.keys.save_final_checkpoint = false;
  parts.options.keys.checkpoint_every = -1;
  ASSERT_EQ(list_checkpoints(parts.options.checkpoint_dir()), std::vector<int64_t>{2});

  // Loaded arrays become the state: there is no second copy.
  return_freed_memory();
  Growth growth;
  growth.begin();
  int64_t state = 0, step = 0;
  parts.options.hooks = {{every_steps(1), [&](LoopView& v) {
                            state = state_bytes(v);
                            step = v.programs.program(0).memory()->temporary;
                          }}};
  const Trained resumed = parts.train(4);
  EXPECT_LT(growth.end(), 2 * state + step) << state;  // loading the program takes less than half a state
  expect_same_bits(resumed.values, expected.values);
}

}  // namespace
}  // namespace md
