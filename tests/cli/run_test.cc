// The script ./run, in a copy of the project with nothing set up: usage, and the error for missing packages.
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "tests/cli/command.h"

namespace md {
namespace {

/// A folder with `run` and its package lists, and a fake `dpkg-query` that knows only g++ and cmake.
class FreshMachine : public testing::Test {
 protected:
  FreshMachine() {
    make_folders(folder_ / "bin");
    write_file_atomic(folder_ / "bin/dpkg-query", "#!/bin/sh\nprintf 'ii g++\\nii cmake\\nrc ccache\\n'\n");
    shell("cp -r " MD_SOURCE_DIR "/run " MD_SOURCE_DIR "/cmake " + folder_.path() + " && chmod -R a+rwX " +
          folder_.path() + " && chmod +x " + folder_.path() + "/bin/dpkg-query");
  }
  /// Runs ./run as a non-root user; `environment`: more arguments of env.
  Outcome run(const std::string& words, const std::string& environment = "-u CI") {
    std::string as_nobody = ::getuid() == 0 ? "setpriv --reuid 65534 --regid 65534 --clear-groups " : "";
    return shell(as_nobody + "env -u MD_DEPS " + environment + " PATH=" + folder_.path() + "/bin:/usr/bin:/bin " +
                 folder_.path() + "/run " + words);
  }
  /// Marks everything as set up, and installs this script as the program.
  void set_up(const std::string& program) {
    const std::string f = folder_.path();
    shell(
        "cd " + f +
        " && mkdir -p .deps build maxdiffusion apps && touch CMakeLists.txt .deps/packages.stamp build/build.ninja && "
        "for m in $(sed -n 's/^[^#].*  # //p' cmake/wheels*.txt); do mkdir -p .deps/$m; done; cp cmake/wheels*.txt "
        ".deps");
    write_file_atomic(f + "/build/maxdiffusion", program);
    shell("sleep 0.05; printf '%s\\n' " + f + "/.deps >" + f + "/build/program.stamp; chmod -R a+rwX " + f +
          "; chmod a+x " + f + "/build/maxdiffusion");
  }
  /// Installs this script as a command.
  void command(const std::string& name, const std::string& script) {
    const std::string file = folder_ / ("bin/" + name);
    write_file_atomic(file, "#!/bin/sh\n" + script);
    shell("chmod a+rx " + file);
  }
  TemporaryFolder folder_;
};

TEST_F(FreshMachine, WithoutWordsRunSaysWhatItCanDo) {
  Outcome o = run("");
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* line : {"/run train configs/quickstart.yml\n", "/run help [COMMAND]\n", "/run test [name] ",
                           "/run test quick ", "/run package "})
    EXPECT_TRUE(contains(o.out, "\n  " + folder_.path() + line)) << line << o.out;
  EXPECT_FALSE(exists(folder_ / ".deps"));
  o = shell("cd " + folder_.path() + " && ./run");
  EXPECT_TRUE(contains(o.out, "\n  ./run train configs/quickstart.yml\n")) << o.out;
}

TEST_F(FreshMachine, BeforeTheBuildUsageNamesEveryCommandOfTheProgram) {
  shell("cd " MD_SOURCE_DIR " && cp --parents maxdiffusion/commands/registry.cc " + folder_.path());
  const std::string usage = run("").out;
  const size_t at = usage.find("the other commands are: ");
  ASSERT_NE(at, usage.npos) << usage;
  std::string help = maxdiffusion({"help"}).out, words = " train " + usage.substr(at, usage.find('\n', at) - at) + " ";
  for (size_t at = 0; (at = help.find("\n  ", at)) != std::string::npos; at += 3) {
    const std::string name = help.substr(at + 3, help.find_first_of(" \n", at + 3) - at - 3);
    if (name.empty() || name == "help" || name == "version") continue;
    EXPECT_TRUE(contains(words, " " + name + " ")) << name << words;
  }
}

TEST_F(FreshMachine, DocsFailsWhereDoxygenDoes) {
  set_up("#!/bin/sh\n");
  command("doxygen", "echo 'a.h:1: error: undocumented' >&2\nexit 1");
  Outcome o = run("docs");
  EXPECT_EQ(o.status, 1);
  EXPECT_TRUE(contains(o.err, "a.h:1: error: undocumented\nerror: doxygen failed (see above)\n")) << o.err;
  command("doxygen", "exit 0");
  o = run("docs");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(o.err.ends_with("/build/docs/html/index.html\n")) << o.err;
}

TEST_F(FreshMachine, UsageListsEveryCommandOfTheProgram) {
  set_up("#!/bin/sh\nexec " MD_BINARY_DIR "/maxdiffusion \"$@\"\n");
  std::string usage = shell("cd " + folder_.path() + " && ./run").out, help = maxdiffusion({"help"}).out;
  int commands = 0;
  for (size_t at = 0; (at = help.find("\n  ", at)) != std::string::npos; at += 3) {
    if (help[at + 3] == ' ') continue;
    std::string name = help.substr(at + 3, help.find_first_of(" \n", at + 3) - at - 3);
    EXPECT_TRUE(contains(usage, "./run " + name)) << name;
    ++commands;
  }
  EXPECT_GE(commands, 2);
}

// S3-14
TEST_F(FreshMachine, WithoutRootTheMissingPackagesAreNamed) {
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

TEST_F(FreshMachine, OtherSystemsGetTheirOwnCommand) {
  const std::string f = folder_.path();
  write_file_atomic(f + "/os-release", "ID=fedora\n");
  make_folders(f + "/usr/bin");
  make_folders(f + "/usr/include/fmt");
  write_file_atomic(f + "/usr/bin/ninja", "");
  write_file_atomic(f + "/usr/include/fmt/core.h", "");
  shell("chmod -R a+rX " + f);
  const std::string there = "MD_OS_RELEASE=" + f + "/os-release MD_USR=" + f + "/usr";
  Outcome o = run("setup", there);
  EXPECT_EQ(o.status, 1);
  EXPECT_TRUE(contains(o.err, "are missing: g++ cmake lld ccache ")) << o.err;  // neither ninja nor fmt
  EXPECT_TRUE(contains(o.err, "\n  try: install them with your system's package manager")) << o.err;
  for (const auto& [manager, line] :
       std::map<std::string, std::string>{{"dnf", "sudo dnf install gcc-c++ cmake lld ccache "},
                                          {"pacman", "sudo pacman -S --needed gcc cmake lld ccache "},
                                          {"zypper", "sudo zypper install gcc-c++ cmake lld ccache "}}) {
    command(manager, "");
    o = run("train configs/quickstart.yml", there);
    EXPECT_EQ(o.status, 1);
    EXPECT_TRUE(contains(o.err, "\n  try: " + line)) << o.err;
    EXPECT_TRUE(contains(o.err, "\n  " + manager + " is not known to have: ")) << o.err;
    EXPECT_TRUE(contains(o.err, "libhighwayhash-dev")) << o.err;
    EXPECT_FALSE(contains(o.err.substr(o.err.find("try: ")), "ninja")) << o.err;
    std::filesystem::remove(f + "/bin/" + manager);
  }
  command("apk", "");
  o = run("train configs/quickstart.yml", there);
  EXPECT_TRUE(contains(o.err, "\n  try: docker build -t maxdiffusion .")) << o.err;
}

TEST_F(FreshMachine, TheProgramSaysHowItWasStarted) {
  set_up("#!/bin/sh\nexec " MD_BINARY_DIR "/maxdiffusion \"$@\"\n");
  Outcome o = shell("cd " + folder_.path() + " && ./run help train");
  EXPECT_TRUE(contains(o.out, "usage: ./run train CONFIG")) << o.out << o.err;
  o = shell("cd " + folder_.path() + " && ./run trian");
  EXPECT_TRUE(contains(o.err, "\n  try: ./run help\n")) << o.err;
  o = run("train");
  EXPECT_TRUE(contains(o.err, "try: " + folder_.path() + "/run train configs/quickstart.yml")) << o.err;
  EXPECT_TRUE(contains(maxdiffusion({"train"}).err, "try: maxdiffusion train configs/quickstart.yml"));
}

// S3-13, S3-14
TEST_F(FreshMachine, AsRootACloneInstallsWhatIsMissingBuildsAndRunsTheCommand) {
  if (::getuid() != 0) return;  // the test above covers users who cannot install
  set_up("");
  const std::string f = folder_.path();
  shell("rm -r " + f + "/build " + f + "/.deps/packages.stamp");
  write_file_atomic(f + "/installed", "ii g++\nii cmake\n");
  command("dpkg-query", "cat " + f + "/installed\n");
  command("apt-get", "echo \"$@\" >>" + f + "/asked\ncase \"$*\" in *install*) for p; do echo \"ii $p\"; done >>" + f +
                         "/installed;; esac\n");
  command("cmake", "mkdir -p " + f + "/build && touch " + f + "/build/build.ninja\n");
  command("ninja",
          "printf '#!/bin/sh\\necho \"$@\"\\n' >" + f + "/build/maxdiffusion; chmod +x " + f + "/build/maxdiffusion\n");
  const std::string start =
      "env -u MD_DEPS -u CI PATH=" + f + "/bin:/usr/bin:/bin " + f + "/run train a.yml run_name=b";
  Outcome o = shell(start);
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(o.out, "train a.yml run_name=b\n") << o.err;
  const std::string commands = read_file(f + "/asked");
  EXPECT_TRUE(contains(commands, " install -y --no-install-recommends ninja-build lld ccache pkg-config ")) << commands;
  EXPECT_TRUE(contains(commands, " unicode-data\n")) << commands;
  EXPECT_FALSE(contains(commands, "g++") || contains(commands, " cmake")) << commands;
  o = shell(start);  // nothing is left to do
  EXPECT_EQ(o.out + o.err, "train a.yml run_name=b\n");
  EXPECT_EQ(read_file(f + "/asked"), commands);
}

TEST_F(FreshMachine, SignalsAndTheExitStatusGoThroughRun) {
  set_up(
      "#!/bin/sh\ntrap 'echo told >$1; exit 143' TERM\n[ $1 = no ] && exit 70\necho here >$1\n"
      "while :; do sleep 0.05; done\n");
  EXPECT_EQ(run("no").status, 70);
  const std::string heard = folder_ / "heard";
  const Outcome o = run(heard + " & p=$!; while [ ! -s " + heard + " ]; do sleep 0.05; done; kill -TERM $p; wait $p");
  EXPECT_EQ(o.status, 143) << o.err;
  EXPECT_EQ(read_file(heard), "told\n");
}

TEST_F(FreshMachine, WrongWordsOfItsOwnCommandsAreRefusedBeforeAnythingIsBuilt) {
  set_up("#!/bin/sh\n");
  command("dpkg-query", "awk '/^[^#]/ {print \"ii \" $1}' " + folder_.path() + "/cmake/packages.txt\n");
  command("ninja", "echo \"$@\" >>" + folder_.path() + "/build/built\n");
  command("ctest", "echo 'Total Tests: 0'\n");
  for (const auto& [words, message] :
       {std::pair{"format --chek", "format: found '--chek'; expected --check, or nothing"},
        {"lint nowhere", "lint: no source's path has 'nowhere' in it"},
        {"docs all", "docs: found 'all' after docs; expected nothing"},
        {"test quick slow", "test: found 'slow' after test quick; expected nothing"},
        {"test nothing", "test: no test is called 'nothing'; "},
        {"fuzz long", "fuzz: found 'long'; expected a number of seconds"}}) {
    const Outcome o = run(words);
    EXPECT_EQ(o.status, 1) << words;
    EXPECT_TRUE(contains(o.err, std::string("error: ") + message)) << o.err;
  }
  EXPECT_FALSE(contains(read_file(folder_ / "build/built"), " all")) << "only build.ninja, which lists the tests";
}

TEST_F(FreshMachine, OnCiAWarningOfTheBuildOrASkippedTestIsAFailure) {
  set_up("#!/bin/sh\n");
  command("dpkg-query", "awk '/^[^#]/ {print \"ii \" $1}' " + folder_.path() + "/cmake/packages.txt\n");
  command("ninja", "cat " + folder_.path() + "/said; true\n");
  command("ctest", "echo \"$@\"; mkdir -p $2/Testing/Temporary; cp " + folder_.path() +
                       "/log $2/Testing/Temporary/LastTest.log\n");
  auto outcome = [&](const std::string& message, const std::string& log, const std::string& environment = "CI=true") {
    write_file_atomic(folder_ / "said", message);
    write_file_atomic(folder_ / "log", log);
    shell("chmod a+r " + folder_.path() + "/said " + folder_.path() + "/log");
    return run("test", environment);
  };
  const std::string warning = "a.cc:3:5: warning: unused\n", skip = "a_test.cc:9: Skipped\nno wheel\n\n";
  const std::string fine = "b_test.cc:7: Skipped\nthis processor has no such products\n\n";
  Outcome o = outcome("[1/2] a.cc\n", "all well\n" + fine);
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "-LE ^interop$")) << "its packages are fetched by ./run test interop alone: " << o.out;
  o = outcome(warning, "");
  EXPECT_EQ(o.status, 1) << o.err;
  EXPECT_TRUE(contains(o.err, warning + "error: the build warns (see above)\n")) << o.err;
  o = outcome("", fine + skip + fine);
  EXPECT_EQ(o.status, 1) << o.err;
  EXPECT_TRUE(contains(o.err, "error: tests were skipped:\na_test.cc:9: Skipped\nno wheel\n")) << o.err;
  EXPECT_FALSE(contains(o.err, "b_test.cc")) << o.err;
  EXPECT_EQ(outcome(warning, skip, "-u CI").status, 0);
}

}  // namespace
}  // namespace md
