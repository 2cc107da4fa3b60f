// Writing files: complete or not at all, on this machine and in buckets, with requests that fail, are slow or end
// halfway; mirrors; leases.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <thread>

#include "maxdiffusion/storage/lease.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/remote_library.h"
#include "maxdiffusion/storage/remote_sync.h"
#include "maxdiffusion/storage/write.h"
#include "tests/remote/world.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using WriteFault = BucketServer::WriteFault;

/// Bytes that differ from their neighbours.
std::string bytes_of(size_t size) {
  std::string bytes(size, '\0');
  uint32_t x = 1;
  for (char& c : bytes) c = static_cast<char>((x = x * 1664525 + 1013904223) >> 24);
  return bytes;
}

class Writing : public testing::TestWithParam<const char*> {
 protected:
  Writing() {
    ::setenv("XDG_CACHE_HOME", (t / "cache").c_str(), 1);
    server().put("out", "", "");
    for (const std::string& key : server().keys("out")) server().erase("out", key);
  }
  ~Writing() override { server().fail_writes(WriteFault::none, 0); }
  std::string at(const std::string& path, double patience = 20) {
    if (GetParam() == std::string("local")) return t / ("out/" + path);
    return std::string(GetParam()) + "://out/" + path + "?retry_limit_seconds=" + std::to_string(patience);
  }
  TemporaryFolder t;
};
using WritingToBuckets = Writing;
INSTANTIATE_TEST_SUITE_P(, Writing, testing::Values("local", "s3", "gs"),
                         [](const auto& i) { return std::string(i.param); });
INSTANTIATE_TEST_SUITE_P(, WritingToBuckets, testing::Values("s3", "gs"),
                         [](const auto& i) { return std::string(i.param); });

TEST_P(Writing, FilesArePutFoundReplacedAndRemoved) {
  EXPECT_FALSE(find_file(at("a/ü b.txt")));
  EXPECT_TRUE(list_all_files(at("a")).empty());
  put_text(at("a/ü b.txt"), "first");
  put_text(at("a/.hidden"), "");
  put_text(at("ab"), "below");
  EXPECT_EQ(get_text(at("a/ü b.txt")), "first");
  ASSERT_TRUE(find_file(at("a/ü b.txt")));
  EXPECT_EQ(find_file(at("a/ü b.txt"))->size, 5);
  EXPECT_FALSE(find_file(at("a")));
  EXPECT_EQ(list_all_files(at("a")).size(), 2u);
  put_text(at("a/ü b.txt"), "second, longer");
  EXPECT_EQ(get_text(at("a/ü b.txt")), "second, longer");
  remove_file(at("a/.hidden"));
  remove_file(at("a/.hidden"));
  EXPECT_EQ(list_all_files(at("a")).size(), 1u);
  remove_folder(at("a"));
  remove_folder(at("a"));
  EXPECT_TRUE(list_all_files(at("a")).empty());
  EXPECT_EQ(get_text(at("ab")), "below");
}

TEST_P(Writing, LargeFilesGoInPartsAndComeBackWithEveryByte) {
  const std::string bytes = bytes_of((size_t{33} << 20) + 12345), from = t / "from", back = t / "back/file";
  const int64_t open = server().open_uploads();
  write_file_atomic(from, bytes);
  put_file(from, at("big.bin"));
  const auto found = find_file(at("big.bin"));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->size, std::ssize(bytes));
  get_file(*found, back);
  EXPECT_TRUE(read_file(back) == bytes);
  EXPECT_EQ(server().open_uploads(), open);
}

TEST_P(WritingToBuckets, RequestsThatFailForAMomentAreTriedAgain) {
  const std::string small = bytes_of(1000), big = bytes_of(size_t{13} << 20), file = t / "big";
  write_file_atomic(file, big);
  int64_t n = 0;
  for (const auto fault : {WriteFault::busy, WriteFault::half, WriteFault::unanswered, WriteFault::slow}) {
    const std::string name = std::to_string(n++);
    SCOPED_TRACE(name);
    server().fail_writes(fault, 1);
    put_text(at("small/" + name), small);
    server().fail_writes(fault, 1, 1);  // in the middle
    put_file(file, at("big/" + name));
    server().fail_writes(WriteFault::none, 0);
    EXPECT_TRUE(server().object("out", "small/" + name) == small);
    EXPECT_TRUE(server().object("out", "big/" + name) == big);
  }
}

TEST_P(WritingToBuckets, PermanentErrorIsReportedInTimeAndKeepsTheOldFile) {
  put_text(at("keep.txt"), "as it was");
  const std::string file = t / "big";
  write_file_atomic(file, bytes_of(size_t{13} << 20));
  server().fail_writes(WriteFault::busy, 1 << 20);
  expect_says(failure_of([&] { put_text(at("keep.txt", 1), "other"); }), {"out/keep.txt'", "attempts"});
  server().fail_writes(WriteFault::half, 1 << 20);
  const Failure f = failure_of([&] { put_file(file, at("new.bin", 1)); });
  expect_says(f, {"out/new.bin'", "attempts", "try: is the network up"});
  EXPECT_LT(f.seconds, 40);
  server().fail_writes(WriteFault::forbidden, 1 << 20);
  expect_says(failure_of([&] { put_text(at("keep.txt"), "other"); }), {"out/keep.txt'", "try: set the credentials"});
  server().fail_writes(WriteFault::none, 0);
  EXPECT_EQ(get_text(at("keep.txt")), "as it was");
  EXPECT_FALSE(find_file(at("new.bin")));
}

TEST_P(WritingToBuckets, AFileOfWhichTheEndCannotBeReadIsNotThereAtAll) {
  put_text(at("old"), "as it was");
  for (const char* name : {"new", "old"}) {
    const auto write = [&] {
      remote_library().write(at(name), int64_t{40} << 20, [](int64_t offset, int64_t size) {
        check(offset == 0, Code::io, "the disk is gone");
        return bytes_of(static_cast<size_t>(size));
      });
    };
    expect_says(failure_of(write), {"the disk is gone"});
  }
  EXPECT_FALSE(find_file(at("new")));
  EXPECT_TRUE(get_text(at("old")) == "as it was");
}

// S3-27
TEST_P(WritingToBuckets, AMirrorHasWhatTheFolderHas) {
  const std::string folder = t / "run";
  const auto put = [&](const std::string& name, const std::string& text) {
    make_folders(fs::path(folder + "/" + name).parent_path());
    write_file_atomic(folder + "/" + name, text);
  };
  put("metrics.jsonl", "1\n");
  put("tensorboard/events", "a");
  put(".lock", "no");
  put("checkpoints/1/weights", "no");
  {
    RemoteSync mirror({{folder, at("run")}, {t / "lines.txt", at("elsewhere/lines.txt")}}, {"checkpoints"});
    mirror.settle();
    EXPECT_EQ(server().keys("out"), (std::vector<std::string>{"run/metrics.jsonl", "run/tensorboard/events"}));
    server().requests();
    mirror.settle();
    for (const std::string& r : server().requests()) EXPECT_FALSE(r.starts_with("P")) << r;  // unchanged
    put("metrics.jsonl", "1\n2\n");
    put("samples/one.png", "picture");
    write_file_atomic(t / "lines.txt", "line");
    server().fail_writes(WriteFault::half, 1);
    mirror.settle();
    EXPECT_EQ(server().object("out", "run/metrics.jsonl"), "1\n2\n");
    EXPECT_EQ(server().object("out", "run/samples/one.png"), "picture");
    EXPECT_EQ(server().object("out", "elsewhere/lines.txt"), "line");
    put("last", "at the end");
  }
  EXPECT_EQ(server().object("out", "run/last"), "at the end");
  // Another process with the same folder uploads only new files.
  server().requests();
  put("metrics.jsonl", "1\n2\n3\n");
  RemoteSync({{folder, at("run")}}, {"checkpoints"}).settle();
  for (const std::string& r : server().requests()) {
    const bool unchanged = r.find("samples") != r.npos || r.find("tensorb") != r.npos;
    EXPECT_FALSE(r.starts_with("P") && unchanged) << r;
  }
  EXPECT_EQ(server().object("out", "run/metrics.jsonl"), "1\n2\n3\n");
}

TEST_P(WritingToBuckets, NothingIsLostThatAMirrorCannotPut) {
  const std::string folder = t / "run";
  make_folders(folder);
  write_file_atomic(folder + "/a", "text");
  server().fail_writes(WriteFault::busy, 1 << 20);
  RemoteSync mirror({{folder, at("run", 1)}}, {});
  mirror.changed();
  expect_says(failure_of([&] { mirror.settle(); }), {"out/run/a'", "attempts"});
  server().fail_writes(WriteFault::none, 0);
  EXPECT_TRUE(server().keys("out").empty());
  mirror.settle();
  EXPECT_EQ(server().object("out", "run/a"), "text");
}

TEST_P(WritingToBuckets, AFolderHasOneOwnerAtATime) {
  {
    const Lease first(at("run"), "process 1 on a");
    first.check();
    const Failure f = failure_of([&] { Lease(at("run"), "process 2 on b", std::chrono::seconds(0)); });
    expect_says(f, {"out/run' is in use by process 1 on a", "another run_name"});
    first.check();
    const Lease other(at("run2"), "process 2 on b");
    // The storage shows that another process has claimed it meanwhile.
    put_text(at("run/.lock/other"), "process 3 on c\n");
    expect_says(failure_of([&] { first.check(); }), {"also in use by process 3 on c"});
    remove_file(at("run/.lock/other"));
    for (const FoundFile& f : list_all_files(at("run/.lock"))) remove_file(f.location);
    expect_says(failure_of([&] { first.check(); }), {"another run uses it now"});
  }
  EXPECT_TRUE(list_all_files(at("run")).empty());
}

TEST_P(WritingToBuckets, TheClaimOfADeadProcessCountsForNothing) {
  server().put("out", "run/.lock/old", "process 1 on elsewhere\n", 1'700'000'000);
  std::string text;
  {
    const Lease claim(at("run"), "process 2 on b");
    const auto left = list_all_files(at("run/.lock"));
    ASSERT_EQ(left.size(), 1u);  // the one without heartbeats is removed
    text = get_text(left[0].location);
  }
  // As left by this process, but with a pid that no process has.
  const std::string me = " " + std::to_string(::getpid()) + " ";
  text.replace(text.find(me), me.size(), " 999999999 ");
  put_text(at("run/.lock/dead"), text);
  const Lease claim(at("run"), "process 2 on b");
  EXPECT_EQ(list_all_files(at("run/.lock")).size(), 1u);
}

TEST_P(WritingToBuckets, AProcessOfThisMachineThatEndsIsWaitedFor) {
  auto first = std::make_unique<Lease>(at("run"), "process 1 on a");
  const std::jthread ending([&] {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(3500));  // longer than all retries of processes that start at once
    first.reset();
  });
  const Lease second(at("run"), "process 2 on a");
  EXPECT_EQ(list_all_files(at("run/.lock")).size(), 1u);
}

TEST_P(WritingToBuckets, OfManyWhoClaimAtOnceOneAtMostHasIt) {
  std::vector<std::jthread> threads;
  std::atomic<int> holding = 0, most = 0, held = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      try {
        const Lease claim(at("race"), "process " + std::to_string(i));
        const int now = ++holding;
        for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
        }
        ++held;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        --holding;
      } catch (const Error&) {
      }
    });
  for (std::jthread& thread : threads) thread.join();
  EXPECT_LE(most, 1);
}

TEST(LocalCache, PathIsStableAndKeepsTheHierarchy) {
  const TemporaryFolder t;
  ::setenv("XDG_CACHE_HOME", t.path().c_str(), 1);
  EXPECT_EQ(local_cache_path("runs/a"), "runs/a");
  const std::string a = local_cache_path("s3://bucket/runs/");
  EXPECT_TRUE(a.starts_with(t.path() + "/maxdiffusion/places/s3/")) << a;
  EXPECT_TRUE(a.ends_with("/bucket/runs")) << a;
  EXPECT_EQ(local_cache_path("s3://who:hush@bucket/runs/b"), a + "/b");
  EXPECT_NE(local_cache_path("s3://bucket/runs?endpoint_override=other"), a);
  EXPECT_NE(local_cache_path("gs://bucket/runs"), a);
  expect_says(failure_of([] { local_cache_path("s3://bucket/../../etc"); }), {"'..' are not names"});
}

}  // namespace
}  // namespace md
