#include "maxdiffusion/base/interrupt.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

using testing::ExitedWithCode;

TEST(InterruptDeathTest, ASignalEndsTheProcessWithItsStatus) {
  for (const auto& [signal, name] : {std::pair{SIGINT, "SIGINT"}, std::pair{SIGTERM, "SIGTERM"}})
    EXPECT_EXIT((handle_interrupts(), std::raise(signal)), ExitedWithCode(128 + signal),
                std::string("stopped by ") + name);
}

TEST(InterruptDeathTest, FirstSignalSavesAndSecondSignalEnds) {
  EXPECT_EXIT(
      {
        handle_interrupts();
        const GracefulStop stop;
        check_interrupt("nothing yet");
        std::raise(SIGTERM);
        if (interrupt_signal() != SIGTERM) std::exit(1);
        try {
          check_interrupt("counting");
          std::exit(2);
        } catch (const Interrupted& e) {
          if (e.message() != "stopped by SIGTERM: counting") std::exit(3);
        }
        std::raise(SIGINT);
        std::exit(4);
      },
      ExitedWithCode(130), "SIGTERM: finishing and saving this step; send it again to stop at once\nSIGINT again");
}

TEST(InterruptDeathTest, AFileThatIsBeingWrittenIsFinishedFirst) {
  TemporaryFolder t;
  static std::string path;
  path = t / "a";
  EXPECT_EXIT(
      {
        handle_interrupts();
        set_write_hook([](const std::string&, size_t bytes) {
          if (bytes > 0) std::raise(SIGINT);
        });
        write_file_atomic(path, "whole");
        std::exit(1);
      },
      ExitedWithCode(130), "stopped by SIGINT");
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(1, std::distance(std::filesystem::directory_iterator(t.path()), std::filesystem::directory_iterator()));
}

TEST(InterruptDeathTest, AnIgnoredSignalStaysIgnored) {
  EXPECT_EXIT(
      {
        std::signal(SIGINT, SIG_IGN);
        handle_interrupts();
        std::raise(SIGINT);
        std::exit(7);
      },
      ExitedWithCode(7), "");
}

TEST(Interrupt, WithoutHandlersNothingIsEverInterrupted) {
  const GracefulStop stop;
  check_interrupt("testing");
  EXPECT_EQ(interrupt_signal(), 0);
}

}  // namespace
}  // namespace md
