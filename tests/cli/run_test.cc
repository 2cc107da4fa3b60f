// The front door, in a copy without anything set up: usage, and the refusal where packages are missing.
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/cli/command.h"

namespace md {
namespace {

/// A folder with `run` and its lists, and a `dpkg-query` that knows only g++ and cmake.
class FreshMachine : public testing::Test {
 protected:
  FreshMachine() {
    make_folders(folder_ / "bin");
    write_file_atomic(folder_ / "bin/dpkg-query", "#!/bin/sh\nprintf 'ii g++\\nii cmake\\nrc ccache\\n'\n");
    shell("cp -r " MD_SOURCE_DIR "/run " MD_SOURCE_DIR "/cmake " + folder_.path() + " && chmod -R a+rwX " +
          folder_.path() + " && chmod +x " + folder_.path() + "/bin/dpkg-query");
  }
  /// As a user who is not root.
  Outcome run(const std::string& words) {
    std::string as_nobody = ::getuid() == 0 ? "setpriv --reuid 65534 --regid 65534 --clear-groups " : "";
    return shell(as_nobody + "env -u MD_DEPS PATH=" + folder_.path() + "/bin:/usr/bin:/bin " + folder_.path() +
                 "/run " + words);
  }
  TemporaryFolder folder_;
};

TEST_F(FreshMachine, WithoutWordsRunSaysWhatItCanDo) {
  Outcome o = run("");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "./run train")) << o.out;
  EXPECT_TRUE(contains(o.out, "./run test [name]")) << o.out;
  EXPECT_TRUE(contains(o.out, "./run test quick")) << o.out;
  EXPECT_FALSE(exists(folder_ / ".deps"));
}

TEST_F(FreshMachine, UsageListsEveryCommandOfTheProgram) {
  std::string usage = run("").out, help = maxdiffusion({"help"}).out;
  int commands = 0;
  for (size_t at = 0; (at = help.find("\n  ", at)) != std::string::npos; at += 3) {
    if (help[at + 3] == ' ') continue;
    std::string name = help.substr(at + 3, help.find_first_of(" \n", at + 3) - at - 3);
    EXPECT_TRUE(contains(usage, "./run " + name)) << name;
    ++commands;
  }
  EXPECT_GE(commands, 2);
}

TEST_F(FreshMachine, NotRootIsToldExactlyWhichPackagesAreMissing) {
  if (!exists("/etc/debian_version")) GTEST_SKIP() << "not Debian";
  for (std::string words : {"train configs/quickstart.yml", "test", "test quick", "setup"}) {
    Outcome o = run(words);
    EXPECT_EQ(o.status, 1);
    EXPECT_TRUE(contains(o.err, "not root, and these Debian packages are missing: ninja-build lld ccache ")) << o.err;
    EXPECT_TRUE(contains(o.err, " unicode-data\n")) << o.err;
    EXPECT_TRUE(contains(o.err, "try: sudo apt-get install")) << o.err;
    EXPECT_FALSE(exists(folder_ / "build"));
  }
}

TEST_F(FreshMachine, SignalsAndTheExitStatusGoThroughRun) {
  // Everything is set up, and the program is a script.
  const std::string f = folder_.path();
  shell("cd " + f +
        " && mkdir -p .deps build maxdiffusion apps && touch CMakeLists.txt .deps/packages.stamp && "
        "for m in $(sed -n 's/^[^#].*  # //p' cmake/wheels.txt); do mkdir -p .deps/$m; done");
  write_file_atomic(f + "/build/maxdiffusion",
                    "#!/bin/sh\ntrap 'echo told >$1; exit 143' TERM\n[ $1 = no ] && exit 70\necho here >$1\n"
                    "while :; do sleep 0.05; done\n");
  shell("sleep 0.05; printf '%s\\n' " + f + "/.deps >" + f + "/build/program.stamp; chmod -R a+rwX " + f +
        "; chmod a+x " + f + "/build/maxdiffusion");
  EXPECT_EQ(run("no").status, 70);
  const std::string heard = f + "/heard";
  const Outcome o = run(heard + " & p=$!; while [ ! -s " + heard + " ]; do sleep 0.05; done; kill -TERM $p; wait $p");
  EXPECT_EQ(o.status, 143) << o.err;
  EXPECT_EQ(read_file(heard), "told\n");
}

}  // namespace
}  // namespace md
