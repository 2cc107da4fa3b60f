// Kills a run while it writes a checkpoint: before, during and after each call that changes the disk. This program
// wraps those C library calls: the wrappers count them, and the kernel kills the process at the chosen one.
// MD_KILL_POINTS is the number of kills to try.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/test_arrays.h"
#include "maxdiffusion/checkpoint/test_processes.h"

namespace {

/// Kill plan of the child that writes. `calls` is memory shared with the parent.
struct Kill {
  std::atomic<int64_t>* calls = nullptr;  // calls so far; null: not counted
  int64_t at = -1;                        // the call at which the process is killed; −1: never
  double done = 0;                        // fraction of that call done before the kill
  bool exchanges = true;                  // whether the file system can exchange two names
} kill_plan;

template <class F>
F* real(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();
}

/// Makes `call`, with the chosen kill before or after it.
template <class F>
auto counted(F call) {
  const bool here = kill_plan.calls && kill_plan.calls->fetch_add(1) == kill_plan.at;
  if (here && kill_plan.done < 0.5) die();
  const auto result = call();
  if (here) die();
  return result;
}

}  // namespace

extern "C" {
ssize_t write(int fd, const void* bytes, size_t size) {
  static auto* const next = real<ssize_t(int, const void*, size_t)>("write");
  if (kill_plan.calls && kill_plan.calls->fetch_add(1) == kill_plan.at) {
    (void)!next(fd, bytes, static_cast<size_t>(static_cast<double>(size) * kill_plan.done));
    die();
  }
  return next(fd, bytes, size);
}
int fsync(int fd) {
  static auto* const next = real<int(int)>("fsync");
  return counted([&] { return next(fd); });
}
int rename(const char* from, const char* to) noexcept {
  static auto* const next = real<int(const char*, const char*)>("rename");
  return counted([&] { return next(from, to); });
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static auto* const next = real<int(int, const char*, int, const char*, unsigned)>("renameat2");
  if (!kill_plan.exchanges) return errno = EINVAL, -1;
  return counted([&] { return next(from_folder, from, to_folder, to, flags); });
}
int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const next = real<int(const char*, mode_t)>("mkdir");
  return counted([&] { return next(path, mode); });
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto* const next = real<int(int, const char*, int)>("unlinkat");
  return counted([&] { return next(folder, path, flags); });
}
int unlink(const char* path) noexcept {
  static auto* const next = real<int(const char*)>("unlink");
  return counted([&] { return next(path); });
}
int rmdir(const char* path) noexcept {
  static auto* const next = real<int(const char*)>("rmdir");
  return counted([&] { return next(path); });
}
int link(const char* from, const char* to) noexcept {
  static auto* const next = real<int(const char*, const char*)>("link");
  return counted([&] { return next(from, to); });
}
int open(const char* path, int flags, ...) {
  static auto* const next = real<int(const char*, int, ...)>("open");
  va_list extra;
  va_start(extra, flags);
  const mode_t mode = va_arg(extra, mode_t);
  va_end(extra);
  if ((flags & (O_CREAT | O_TRUNC)) == 0) return next(path, flags, mode);
  return counted([&] { return next(path, flags, mode); });
}
}  // extern "C"

namespace md {
namespace {

namespace fs = std::filesystem;

/// The part of process `p` of `n`: its rows of two arrays; process 0 has everything else. All elements are `value`, so
/// that a mix of two checkpoints would show.
CheckpointContent content_of(int64_t p, int64_t n, float value, const std::string& linked) {
  auto rows = [&](int64_t all) {
    return ShardedArray({DType::f32, {all, 3}}, {{Slice{{p * all / n, 0}, {all / n, 3}}, filled({all / n, 3}, value)}});
  };
  CheckpointContent c;
  c.state["adam_m/unet/w"] = rows(8);
  c.weights["unet"]["w"] = rows(4);
  c.weights["vae"]["w"] = ShardedArray({DType::f32, {5}}, {});
  if (p == 0) c.weights["vae"]["w"] = filled({5}, value);
  c.files["model_index.json"] = "{}";
  c.linked["tokenizer/vocab.json"] = linked;
  c.state_json = "{\"value\": " + std::to_string(value) + "}";
  return c;
}

float value_of(const HostArray& a) {
  const auto v = a.view<float>();
  EXPECT_EQ(std::set(v.begin(), v.end()).size(), 1u) << "a mixture of two checkpoints";
  return v[0];
}

/// The value that all elements of a checkpoint share.
float value_of(const std::string& dir, int64_t step) {
  const CheckpointContent c = read_training_state(dir, step);
  std::set<float> values = {value_of(c.state.at("adam_m/unet/w").whole())};
  const std::string folder = checkpoint_folder(dir, step);
  const auto split = c.state.find("weights/unet/w");
  values.insert(value_of(split != c.state.end() ? split->second.whole()
                                                : SafetensorsReader::open(folder + "/unet").tensors().at("w")));
  values.insert(value_of(SafetensorsReader::open(folder + "/vae").tensors().at("w")));
  EXPECT_EQ(read_file(folder + "/tokenizer/vocab.json"), "{\"a\": 0}");
  EXPECT_EQ(values.size(), 1u) << "step " << step << " is a mixture";
  EXPECT_EQ(c.state_json, content_of(0, 1, *values.begin(), "").state_json);
  return *values.begin();
}

struct Scenario {
  int64_t processes;
  int64_t step;  // 3: new, so the oldest of two is removed; 2: already exists
  bool exchanges;
};

/// Writes the scenario's checkpoint in a child that is killed as `plan` says; returns whether it was killed.
bool is_killed(const Scenario& s, const std::string& dir, const std::string& linked, const Kill& plan) {
  const pid_t child = ::fork();
  if (child == 0) {
    kill_plan = plan;
    const auto errors = as_processes(s.processes, [&](const CheckpointProcesses& of) {
      CheckpointWriter w(dir, 2, of);
      w.save(s.step, [&] { return content_of(of.process, s.processes, 3, linked); });
      w.finish();
    });
    kill_plan.calls = nullptr;
    ::_exit(errors == std::vector<std::string>(errors.size()) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

// P-7
TEST(KillPoints, AKillAtAnyMomentLosesNoCheckpoint) {
  const char* requested = std::getenv("MD_KILL_POINTS");
  const int64_t kills = requested ? std::atoll(requested) : 600;
  const std::vector<Scenario> scenarios = {{1, 3, true}, {1, 2, true}, {1, 2, false},
                                           {2, 3, true}, {2, 2, true}, {4, 3, true}};
  auto* calls = static_cast<std::atomic<int64_t>*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::mt19937 random(7);
  std::map<std::string, int64_t> outcomes;
  std::vector<int64_t> lengths(scenarios.size(), 0);
  int64_t killed = 0;
  for (int64_t k = 0; killed < kills; ++k) {
    ASSERT_LT(k, 2 * kills + 100);
    const size_t which = static_cast<size_t>(k) % scenarios.size();
    const Scenario& s = scenarios[which];
    TemporaryFolder t(exists("/dev/shm") ? "/dev/shm" : "");
    const std::string linked = t / "vocab.json", dir = t / "checkpoints";
    write_file_atomic(linked, "{\"a\": 0}");
    for (int64_t step : {1, 2})
      ASSERT_EQ(as_processes(s.processes,
                             [&](const CheckpointProcesses& of) {
                               write_checkpoint(dir, step,
                                                content_of(of.process, s.processes, static_cast<float>(step), linked),
                                                of);
                             }),
                std::vector<std::string>(static_cast<size_t>(s.processes)));
    // The first round of a scenario kills nothing and counts the calls. Later rounds kill at one call after the other.
    const int64_t round = k / static_cast<int64_t>(scenarios.size());
    Kill plan{calls, -1, 0, s.exchanges};
    if (round > 0) {
      plan.at = (round - 1) % lengths[which];
      plan.done = round <= lengths[which] ? 0 : std::uniform_real_distribution(0.0, 1.0)(random);
    }
    *calls = 0;
    const bool was_killed = is_killed(s, dir, linked, plan);
    if (round == 0) {
      EXPECT_FALSE(was_killed);
      lengths[which] = *calls;
      EXPECT_GT(lengths[which], 30) << "too few calls are seen";
    }
    killed += was_killed;

    // What the next run finds: the newest checkpoint is the old or the new one, complete, and nothing is half written.
    { const CheckpointWriter next(dir, 0); }
    const std::vector<int64_t> steps = list_checkpoints(dir);
    ASSERT_FALSE(steps.empty()) << "scenario " << which << ", call " << plan.at;
    for (const auto& f : fs::directory_iterator(dir))
      EXPECT_NE(f.path().filename().string()[0], '.') << f.path() << ", call " << plan.at;
    const float newest = value_of(dir, steps.back());
    EXPECT_TRUE(newest == 3 || (newest == 2 && steps.back() == 2 && was_killed)) << newest;
    for (int64_t step : steps)
      if (step != s.step) {
        EXPECT_EQ(value_of(dir, step), static_cast<float>(step));
      }
    ++outcomes[!was_killed ? "not killed" : newest == 3 ? "killed, the new one is whole" : "killed, the one before"];
  }
  for (const auto& [outcome, times] : outcomes) {
    RecordProperty(outcome, std::to_string(times));
    if (requested) std::printf("%s: %lld\n", outcome.c_str(), static_cast<long long>(times));
  }
  EXPECT_GT(outcomes["killed, the one before"], kills / 4);
  EXPECT_GT(outcomes["killed, the new one is whole"], 0);
  ::munmap(calls, 4096);
}

}  // namespace
}  // namespace md
