// A disk that really fills up: the kernel's file size limit makes write(2) write short and then fail, which a hook
// cannot imitate. Checkpoints saved before must still be found.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/test_arrays.h"

namespace md {
namespace {

CheckpointContent content_of(float value, int64_t elements) {
  CheckpointContent c;
  c.weights["unet"] = {{"w", filled({elements}, value)}};
  c.state = {{"m", filled({elements}, value)}};
  c.state_json = "{}";
  return c;
}

/// Runs `f` in a child process that may write files of at most `bytes`; returns the error it printed.
std::string error_with_file_limit(rlim_t bytes, const std::function<void()>& f) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);  // so that write(2) fails with EFBIG instead
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::string text = "no error";
    try {
      f();
    } catch (const Error& e) {
      text = std::string(to_string(e.code())) + ": " + e.what();
    }
    [[maybe_unused]] auto n = ::write(ends[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text(4096, '\0');
  const auto n = ::read(ends[0], text.data(), text.size());
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  text.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  return text;
}

TEST(FullDisk, ASaveThatDoesNotFitLosesNothing) {
  TemporaryFolder t;
  write_checkpoint(t.path(), 1, content_of(1, 1000));
  for (int64_t step : {2, 1}) {
    const std::string e =
        error_with_file_limit(100'000, [&] { write_checkpoint(t.path(), step, content_of(2, 50'000)); });
    EXPECT_EQ(e.rfind("io: write '" + t.path(), 0), 0u) << e;
    EXPECT_NE(e.find("while saving checkpoint " + std::to_string(step)), std::string::npos) << e;
    EXPECT_EQ(list_checkpoints(t.path()), (std::vector<int64_t>{1}));
    EXPECT_EQ(1, std::distance(std::filesystem::directory_iterator(t.path()), std::filesystem::directory_iterator()));
    EXPECT_EQ(SafetensorsReader::open(t / "1/unet").tensors().at("w").view<float>()[999], 1);
    EXPECT_EQ(read_training_state(t.path(), 1).state.at("m").whole().view<float>()[999], 1);
  }
}

TEST(FullDisk, ASafetensorsFileThatDoesNotFitLeavesTheOldOne) {
  TemporaryFolder t;
  write_safetensors(t / "a.safetensors", {{"w", filled({10}, 1)}});
  const std::string before = read_file(t / "a.safetensors");
  const std::string e = error_with_file_limit(10'000, [&] {
    write_safetensors(t / "a.safetensors", {{"w", filled({9'000}, 2)}});
  });
  EXPECT_EQ(e.rfind("io: write '", 0), 0u) << e;
  EXPECT_EQ(read_file(t / "a.safetensors"), before);
}

}  // namespace
}  // namespace md
