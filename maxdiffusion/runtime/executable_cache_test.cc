// Executables on disk: found again, keyed by everything that matters, harmless when damaged.
#include "maxdiffusion/runtime/executable_cache.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/runtime/test_ops.h"

namespace md {
namespace {

namespace fs = std::filesystem;

class Cache : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "executable_cache_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  Program build(const CompileConfig& config) {
    Graph g(devices_.graph_options());
    Tensor x = g.input("x", {DType::f32, {64, 64}});
    for (int i = 0; i < 20; ++i) x = apply(kTestMatmul, {x, apply(kTestAdd, {x, x})});
    g.output("y", x);
    return compile(devices_, g, config, "cached");
  }
  Program build() { return build({.jax_cache_dir = folder_, .xla_flags = ""}); }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> out;
    for (const auto& e : fs::directory_iterator(folder_)) out.push_back(e.path());
    return out;
  }
  double check_runs(const Program& p) {
    HostArray zeros(Shape{DType::f32, {64, 64}});
    for (float& v : zeros.mutable_view<float>()) v = 0.0625f;
    Array a = devices_.put(zeros);
    return devices_.get(p.run({&a})[0]).view<float>()[5];
  }

  Devices devices_ = Devices::open();
  std::string folder_;
};

TEST_F(Cache, SecondCompileLoads) {
  const Program first = build();
  EXPECT_FALSE(first.report().from_cache);
  ASSERT_EQ(entries().size(), 1u);
  const Program second = build();
  EXPECT_TRUE(second.report().from_cache);
  EXPECT_EQ(second.report().compile_seconds, 0);
  EXPECT_LT(second.report().load_seconds, first.report().compile_seconds);
  EXPECT_EQ(check_runs(first), check_runs(second));
}

TEST_F(Cache, OptionsAndProgramAreInTheKey) {
  build();
  EXPECT_FALSE(
      build({.jax_cache_dir = folder_, .xla_flags = "--xla_backend_optimization_level=1"}).report().from_cache);
  EXPECT_EQ(entries().size(), 2u);
  Graph g(devices_.graph_options());
  g.output("y", g.input("x", {DType::f32, {64, 64}}));
  EXPECT_FALSE(compile(devices_, g, {.jax_cache_dir = folder_, .xla_flags = ""}, "cached").report().from_cache);
  EXPECT_EQ(entries().size(), 3u);
}

TEST_F(Cache, DamagedEntriesAreCompiledAgain) {
  build();
  const std::string path = entries().at(0).string(), good = read_file(path);
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  for (const std::string& bad : {std::string(), good.substr(0, 10), good.substr(0, good.size() / 2), flipped,
                                 std::string("something else entirely")}) {
    write_file_atomic(path, bad);
    const Program p = build();
    EXPECT_FALSE(p.report().from_cache);
    check_runs(p);
    EXPECT_TRUE(build().report().from_cache) << "the good entry is back";
  }
}

TEST_F(Cache, EntryWithAValidHashThatDoesNotLoadIsCompiledAgain) {
  build();
  const std::string key = entries().at(0).stem().string();
  ExecutableCache(folder_).put(key, "no executable, but hashed");
  EXPECT_EQ(ExecutableCache(folder_).get(key), "no executable, but hashed");
  const Program p = build();
  EXPECT_FALSE(p.report().from_cache);
  EXPECT_TRUE(build().report().from_cache);
}

TEST_F(Cache, FolderThatCannotBeWrittenIsNoFailure) {
  write_file_atomic(folder_ + "/file", "x");
  EXPECT_NO_THROW(check_runs(build({.jax_cache_dir = folder_ + "/file/below", .xla_flags = ""})));
}

TEST_F(Cache, EntriesLongestUnusedGoFirst) {
  const ExecutableCache cache(folder_, 3500);
  const std::string kilobyte(1000, 'x');
  const auto now = fs::file_time_type::clock::now();
  int age = 10;
  for (const char* key : {"a", "b", "c"}) {
    cache.put(key, kilobyte);
    fs::last_write_time(cache.path(key), now - std::chrono::seconds(age--));
  }
  write_file_atomic(folder_ + "/someone_elses.file", std::string(10000, 'y'));
  EXPECT_TRUE(cache.get("a"));  // now the newest
  cache.put("d", kilobyte);
  EXPECT_TRUE(cache.get("a"));
  EXPECT_FALSE(cache.get("b"));
  EXPECT_TRUE(cache.get("c"));
  EXPECT_TRUE(cache.get("d"));
  EXPECT_TRUE(exists(folder_ + "/someone_elses.file"));
}

TEST_F(Cache, OffWritesNothingAndDefaultFollowsXdg) {
  build({.jax_cache_dir = "off", .xla_flags = ""});
  EXPECT_TRUE(entries().empty());
  EXPECT_EQ(ExecutableCache("off").path("k"), "");
  setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  EXPECT_EQ(ExecutableCache("").path("k"), folder_ + "/maxdiffusion/k.pjrt");
  unsetenv("XDG_CACHE_HOME");
  EXPECT_TRUE(ExecutableCache("").path("k").ends_with("/.cache/maxdiffusion/k.pjrt"));
}

}  // namespace
}  // namespace md
