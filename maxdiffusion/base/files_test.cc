#include "maxdiffusion/base/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "maxdiffusion/base/address_space.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/new_files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

namespace fs = std::filesystem;

int64_t files_in(const std::string& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

template <class F>
std::string io_message(F f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.message();
  }
  return "no error";
}

struct Hooked {
  explicit Hooked(WriteHook hook) { set_write_hook(hook); }
  ~Hooked() { set_write_hook(nullptr); }
};

TEST(Files, WholeFilesReadBack) {
  TemporaryFolder folder;
  std::string path = folder / "a", content("x\0y\n", 4);
  write_file_atomic(path, content);
  EXPECT_EQ(read_file(path), content);
  write_file_atomic(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(files_in(folder.path()), 1);
}

TEST(Files, ErrorsNameThePath) {
  TemporaryFolder folder;
  EXPECT_NE(io_message([&] { read_file(folder / "none"); }).find(folder / "none"), std::string::npos);
  EXPECT_NE(io_message([&] { read_file(folder.path()); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(io_message([&] { write_file_atomic(folder / "no/such", "x"); }).find(folder / "no/such"),
            std::string::npos);
  write_file_atomic(folder / "file", "x");
  EXPECT_NE(io_message([&] { make_folders(folder / "file/sub"); }).find(folder / "file/sub"), std::string::npos);
  EXPECT_NE(io_message([&] { rename_durable(folder / "none", folder / "other"); }).find("none"), std::string::npos);
}

TEST(Files, WhatCannotBeWrittenIntoIsNamedWithItsKey) {
  TemporaryFolder folder;
  check_writable(folder / "a/b", "output_dir");
  EXPECT_EQ(files_in(folder.path()), 0);  // nothing is written
  write_file_atomic(folder / "file", "x");
  try {
    check_writable(folder / "file/sub", "output_dir");
    FAIL() << "below a file";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_EQ(std::string(e.what()),
              "write into '" + (folder / "file") + "': not a folder\n  output_dir is '" + (folder / "file/sub") + "'");
  }
  EXPECT_NE(io_message([] { check_writable("/proc/self", "output_dir"); }).find("write into '/proc/self': "),
            std::string::npos);
}

TEST(Files, AFifoIsRefusedWithoutWaiting) {
  TemporaryFolder folder;
  const std::string fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(io_message([&] { read_file(fifo); }), "read '" + fifo + "': not a regular file");
  EXPECT_EQ(io_message([&] { FileWriter w(fifo, FileWriter::Open::append); }),
            "write '" + fifo + "': not a regular file");
}

TEST(Files, AFileOverTheLimitOfItsSizeIsAnIoError) {
  TemporaryFolder folder;
  const auto write = [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit least{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &least);
    std::fputs(io_message([&] { write_file_atomic(folder / "a", std::string(8192, 'x')); }).c_str(), stderr);
    std::_Exit(files_in(folder.path()) == 0 ? 4 : 1);
  };
  EXPECT_EXIT(write(), testing::ExitedWithCode(4), "write '.*/a.tmp-.*': File too large");
}

TEST(AddressSpace, CrashUnderALimitIsExplained) {
  EXPECT_EQ(address_space_left(), std::nullopt);
  const auto crash = [] {
    const rlimit limit{rlim_t{1} << 44, RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    const auto left = address_space_left();
    if (!left || *left <= 0 || *left >= int64_t{1} << 44) std::_Exit(1);
    explain_crashes_under_a_limit();
    ::raise(SIGSEGV);
  };
  EXPECT_EXIT(crash(), testing::ExitedWithCode(6), "crashed under a limit on its address space .ulimit -v.");
}

TEST(Files, FailedReplacementKeepsTheOldFile) {
  TemporaryFolder folder;
  std::string path = folder / "state";
  write_file_atomic(path, "old");
  for (size_t failing : {0u, 3u}) {  // 0: the fsync, 3: the write
    static size_t bytes_that_fail;
    bytes_that_fail = failing;
    Hooked hook([](const std::string& at, size_t bytes) {
      if (bytes == bytes_that_fail) fail(Code::io, "write '{}': no space left", at);
    });
    EXPECT_NE(io_message([&] { write_file_atomic(path, "new"); }), "no error");
    EXPECT_EQ(read_file(path), "old");
    EXPECT_EQ(files_in(folder.path()), 1);
  }
}

TEST(Files, AFullDiskIsAnIoErrorWithAHint) {
  if (!exists("/dev/full")) GTEST_SKIP() << "/dev/full is missing";
  FileWriter w("/dev/full");
  try {
    w.write("x", 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(std::string(e.what()).find("'/dev/full'"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("try: free space"), std::string::npos);
  }
}

TEST(Files, WritersAppendOrTruncate) {
  TemporaryFolder folder;
  std::string path = folder / "log";
  for (auto how : {FileWriter::Open::truncate, FileWriter::Open::append}) {
    FileWriter w(path, how);
    w.write("ab", 2);
    w.close();
  }
  EXPECT_EQ(read_file(path), "abab");
  FileWriter w(path);
  w.close();
  EXPECT_EQ(read_file(path), "");
}

TEST(Files, AMapOutlivesTheNameOfItsFile) {
  TemporaryFolder folder;
  write_file_atomic(folder / "a", "abc");
  MappedFile m = map_file(folder / "a");
  fs::remove(folder / "a");
  ASSERT_EQ(m.size, 3u);
  EXPECT_EQ(std::memcmp(m.data, "abc", 3), 0);
  write_file_atomic(folder / "empty", "");
  EXPECT_EQ(map_file(folder / "empty").size, 0u);
}

TEST(Files, ContentHashDistinguishesContents) {
  EXPECT_EQ(content_hash("").size(), 32u);
  EXPECT_EQ(content_hash("a"), content_hash("a"));
  EXPECT_NE(content_hash("a"), content_hash("b"));
  EXPECT_EQ(content_hash(""), "99aa06d3014798d86001c324468d497f");  // xxHash's published value, so caches stay valid
}

TEST(TemporaryFolder, IsRemovedWithItsContents) {
  std::string path;
  {
    TemporaryFolder folder;
    path = folder.path();
    make_folders(folder / "deep/down");
    write_file_atomic(folder / "deep/down/file", "x");
  }
  EXPECT_FALSE(exists(path));
}

TEST(Error, PrintsMessageThenNotes) {
  Error e(Code::io, "read 'a': gone");
  e.note("try: another").note("or not");
  EXPECT_STREQ(e.what(), "read 'a': gone\n  try: another\n  or not");
  EXPECT_EQ(e.notes().size(), 2u);
  EXPECT_STREQ(to_string(Code::out_of_memory), "out of memory");
  EXPECT_NO_THROW(check(true, Code::io, "{}", 1));
  EXPECT_THROW(check(false, Code::io, "{}", 1), Error);
}

TEST(Files, ALinkAtTheTemporaryNameIsNotFollowed) {
  const TemporaryFolder t;
  const std::string victim = t / "victim", path = t / "file";
  write_file_atomic(victim, "kept");
  const std::string other = t / "others";
  fs::create_directory(other);
  for (int i = 0; i < 200; ++i) {
    const std::string end = ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(i);
    fs::create_symlink(victim, path + end);
    fs::create_symlink(other, t / "folder" + end);
    fs::create_symlink(victim, t / ".writable" + end);
  }
  write_file_atomic(path, "written");
  check_writable(t.path(), "output_dir");
  write_file_atomic(new_folder_next_to(t / "folder") + "/a", "x");
  EXPECT_EQ(read_file(victim), "kept");
  EXPECT_EQ(read_file(path), "written");
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_TRUE(fs::is_empty(other));
}

TEST(Files, AFileThatThisUserMayNotReadIsNamed) {
  const TemporaryFolder t;
  write_file_atomic(t / "file", "x");
  make_folders(t / "folder/below");
  write_file_atomic(t / "folder/below/file", "x");
  fs::create_symlink("nowhere", t / "folder/link");
  const auto unreadable = [&](const std::string& closed) {
    const auto before = fs::status(closed).permissions();
    fs::permissions(closed, fs::perms::none);
    const bool root = ::geteuid() == 0;  // root may read everything
    if (root) fs::permissions(t.path(), fs::perms::all);
    if (root && ::seteuid(65534) != 0) return std::string("seteuid");
    const std::optional<Error> why = unreadable_in(t.path());
    if (root && ::seteuid(0) != 0) return std::string("seteuid");
    fs::permissions(closed, before);
    return why ? why->message() : "";
  };
  EXPECT_FALSE(unreadable_in(t.path()));
  EXPECT_FALSE(unreadable_in(t / "none"));
  for (const std::string name : {"file", "folder", "folder/below", "folder/below/file"})
    EXPECT_EQ(unreadable(t / name), "open '" + t / name + "': Permission denied");
}

TEST(Files, TooManyOpenFilesAreNamedAsTheCause) {
  const auto read = [] {
    const rlimit few{32, 32};
    ::setrlimit(RLIMIT_NOFILE, &few);
    while (::dup(0) >= 0) continue;
    try {
      read_file("/proc/self/status");
    } catch (const Error& e) {
      std::fprintf(stderr, "%s", e.what());
      std::_Exit(e.code() == Code::io ? 4 : 1);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(read(), testing::ExitedWithCode(4), "Too many open files(.|\n)*ulimit -n");
}

}  // namespace
}  // namespace md
