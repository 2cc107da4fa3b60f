// Gives hostile texts, then randomly damaged files, by number, to every parser: each must be rejected by md::Error with
// a message, or read. Each parser runs in its own process, so that a crash, a hang or excessive memory is counted, and
// its input kept. The files are the same in every run. MD_FUZZ_SECONDS: time for all parsers together, instead of a
// fixed number of files; MD_FUZZ_SEED: another random seed. `./run fuzz` prints the table of docs/dev/faults.md.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "tests/fuzz/mutate.h"
#include "tests/fuzz/targets.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostBytes = 1 << 20;
constexpr int kHangSeconds = 20;

/// What a child reports to its parent, in shared memory so that it survives the child's death.
struct Report {
  int64_t tried = 0, refused = 0, accepted = 0;
  char fault[512] = {};  // an exception of another type, or a program defect
  size_t bytes = 0;
  char input[kMostBytes] = {};
};

const std::vector<FuzzTarget>& targets() {
  static const std::vector<FuzzTarget> all = fuzz_targets();
  return all;
}

/// Time per parser; nothing: the number of files that its target sets.
std::optional<double> seconds() {
  const char* s = std::getenv("MD_FUZZ_SECONDS");
  return s ? std::optional(std::atof(s) / static_cast<double>(targets().size())) : std::nullopt;
}

uint64_t seed() {
  const char* s = std::getenv("MD_FUZZ_SEED");
  return s ? std::strtoull(s, nullptr, 10) : 1;
}

[[noreturn]] void end(Report& report, const std::string& fault) {
  std::strncpy(report.fault, fault.c_str(), sizeof report.fault - 1);
  ::_exit(99);
}

/// Parses one file; the child exits if it is neither rejected by name nor read.
void try_one(const FuzzTarget& target, const std::string& bytes, const std::string& folder, Report& report) {
  report.bytes = std::min(bytes.size(), kMostBytes);
  std::memcpy(report.input, bytes.data(), report.bytes);
  ++report.tried;
  std::string fault;
  ::alarm(kHangSeconds);
  try {
    target.read(bytes, folder);
    ++report.accepted;
  } catch (const Error& e) {
    ++report.refused;
    if (e.code() == Code::internal || e.message().empty()) fault = std::string("a defect: ") + e.what();
  } catch (const std::bad_alloc&) {
    fault = "it takes all memory";
  } catch (const std::exception& e) {
    fault = std::string("a raw message: ") + e.what();
  }
  ::alarm(0);
  if (!fault.empty()) end(report, fault);
}

[[noreturn]] void child(const FuzzTarget& target, Report& report) {
  set_log_level(LogLevel::error);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const rlimit memory{rlim_t{6} << 30, rlim_t{6} << 30};
  ::setrlimit(RLIMIT_AS, &memory);
#endif
  const TemporaryFolder folder;
  try {
    for (const std::string& whole : target.seeds) target.read(whole, folder.path());
  } catch (const std::exception& e) {
    end(report, std::string("a whole file is refused: ") + e.what());
  }
  for (const std::string& text : hostile_texts()) try_one(target, text, folder.path(), report);
  const auto start = Clock::now();
  const std::optional<double> limit = seconds();
  Random random(seed() * 1'000'003 + std::hash<std::string>()(target.name));
  for (int64_t i = 0;; ++i) {
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    if (limit ? spent > *limit : i >= target.files) break;
    try_one(target, damaged(target.seeds[static_cast<size_t>(i) % target.seeds.size()], random), folder.path(), report);
  }
  std::error_code ec;
  std::filesystem::remove_all(folder.path(), ec);
  ::_exit(0);
}

/// Result of a target: empty, or the fault and where the input was saved.
std::string run(const FuzzTarget& target, Report& report) {
  ::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) child(target, report);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  const std::string what = !WIFSIGNALED(status)          ? report.fault
                           : WTERMSIG(status) == SIGALRM ? fmt::format("no end after {} s", kHangSeconds)
                                                         : fmt::format("signal {}", WTERMSIG(status));
  std::string name = target.name;
  std::ranges::replace(name, ' ', '_');
  const std::string saved =
      fmt::format(MD_BINARY_DIR "/fuzz_{}_{}", name, content_hash({report.input, report.bytes}).substr(0, 8));
  write_file_atomic(saved, {report.input, report.bytes});
  return what + "; the file is kept as " + saved;
}

class Fuzz : public testing::TestWithParam<size_t> {
 protected:
  static void SetUpTestSuite() {
    if (seconds()) fmt::print("| input | damaged | refused | read |\n| --- | --- | --- | --- |\n");
  }
  static void TearDownTestSuite() { fmt::print("{} damaged files\n", tried_); }
  static inline int64_t tried_ = 0;
};

TEST_P(Fuzz, WholeFilesAreReadAndHostileAndDamagedOnesRefusedByNameOrRead) {
  const FuzzTarget& target = targets()[GetParam()];
  void* shared = ::mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  Report& report = *new (shared) Report;
  EXPECT_EQ(run(target, report), "");
  EXPECT_GE(report.tried, std::ssize(hostile_texts()) + (seconds() ? 0 : target.files));
  if (seconds()) fmt::print("| {} | {} | {} | {} |\n", target.name, report.tried, report.refused, report.accepted);
  tried_ += report.tried;
  ::munmap(shared, sizeof(Report));
}

INSTANTIATE_TEST_SUITE_P(Of, Fuzz, testing::Range<size_t>(0, targets().size()), [](const auto& info) {
  std::string name = targets()[info.param].name;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST(Corpus, FilesThatWereFaultsAreNoneAnyMore) {
  const std::string corpus = MD_SOURCE_DIR "/tests/fuzz/corpus/";
  const std::map<std::string, std::string> files = {{"config.json of AutoencoderKLWan", "res_blocks.json"},
                                                    {"scheduler_config.json", "timesteps.json"},
                                                    {"index of shards", "offset.json"}};
  size_t found = 0;
  for (const FuzzTarget& target : targets()) {
    const auto file = files.find(target.name);
    if (file == files.end()) continue;
    ++found;
    const TemporaryFolder folder;
    EXPECT_THROW(target.read(read_file(corpus + file->second), folder.path()), Error) << target.name;
  }
  EXPECT_EQ(found, files.size());
}

}  // namespace
}  // namespace md
