// Executables on disk: they are found again, the key covers everything that matters, damaged ones do no harm.
#include "maxdiffusion/runtime/executable_cache.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/runtime/executable_key.h"
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

  Program build(const Devices& devices, const CompileConfig& config) {
    Graph g(devices.graph_options());
    Tensor x = g.input("x", {DType::f32, {64, 64}});
    for (int i = 0; i < 20; ++i) x = apply(kTestMatmul, {x, apply(kTestAdd, {x, x})});
    g.output("y", x);
    return compile(devices, g, config, "cached");
  }
  Program build(const CompileConfig& config) { return build(devices_, config); }
  Program build() { return build({.jax_cache_dir = folder_, .xla_flags = ""}); }
  bool is_cached(const Devices& devices) {
    return build(devices, {.jax_cache_dir = folder_, .xla_flags = ""}).report().from_cache;
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> out;
    for (const auto& e : fs::directory_iterator(folder_))
      if (e.path().extension() == ".pjrt") out.push_back(e.path());
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

// S0-96, S0-98
TEST_F(Cache, SecondCompileLoads) {
  const Program first = build();
  EXPECT_FALSE(first.report().from_cache);
  EXPECT_EQ(first.report().load_seconds, 0) << "nothing was loaded";
  ASSERT_EQ(entries().size(), 1u);
  const Program second = build();
  EXPECT_TRUE(second.report().from_cache);
  EXPECT_EQ(second.report().compile_seconds, 0) << "nothing was compiled";
  EXPECT_EQ(entries().size(), 1u);
  EXPECT_EQ(check_runs(first), check_runs(second));
}

TEST_F(Cache, AotCacheDirTakesTheCachesPlace) {
  const CompileConfig ahead{.jax_cache_dir = "off", .xla_flags = "", .aot_cache_dir = folder_};
  EXPECT_FALSE(build(ahead).report().from_cache);
  EXPECT_TRUE(build(ahead).report().from_cache);
  EXPECT_TRUE(build().report().from_cache) << "the same entry";
}

// S0-98
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

// P-12
TEST_F(Cache, VariablesThatThePluginReadsAreInTheKey) {
  for (const char* name : {"XLA_FLAGS", "PJRT_NPROC"}) ::unsetenv(name);
  EXPECT_FALSE(is_cached(devices_));
  for (const char* name : {"XLA_FLAGS", "PJRT_NPROC"}) {
    ::setenv(name, name[0] == 'X' ? "--xla_backend_optimization_level=1" : "2", 1);
    EXPECT_FALSE(is_cached(devices_)) << name;
    EXPECT_TRUE(is_cached(devices_)) << name;
    ::unsetenv(name);
    EXPECT_TRUE(is_cached(devices_)) << name;
  }
  const std::string flags = folder_ + "/flags";
  ::setenv("XLA_FLAGS", flags.c_str(), 1);
  for (const char* level : {"0", "1"}) {
    write_file_atomic(flags, std::string("--xla_backend_optimization_level=") + level);
    EXPECT_FALSE(is_cached(devices_)) << level;
  }
  EXPECT_TRUE(is_cached(devices_));
  ::unsetenv("XLA_FLAGS");
}

// P-12
TEST_F(Cache, TheOrderOfDevicesIsInTheKey) {
  const auto client = pjrt::Client::open("cpu", {{"cpu_device_count", int64_t{2}}});
  Topology swapped = topology(*client);
  const Devices forth(client, Mesh::make({}, swapped));
  for (DeviceInfo& d : swapped.devices) d.slice = 1 - d.id;  // meshes sort slices by number
  const Devices back(client, Mesh::make({}, swapped));
  ASSERT_EQ(forth.mesh().device_ids(), (std::vector<int>{0, 1}));
  ASSERT_EQ(back.mesh().device_ids(), (std::vector<int>{1, 0}));
  EXPECT_FALSE(is_cached(forth));
  EXPECT_FALSE(is_cached(back));
  EXPECT_TRUE(is_cached(forth));
  EXPECT_TRUE(is_cached(back));
}

// P-12
TEST_F(Cache, KindAndPlaceOfEachDeviceAreInTheKey) {
  const pjrt::CompileOptions options{.device_ids = {0, 1}, .flags = {}};
  auto key = [&](const std::vector<pjrt::Device>& devices) {
    return executable_key("program", options, {devices_.client().platform(), "1", "plugin", devices});
  };
  pjrt::Device first, second;
  first.coords = {0, 0, 0}, second.coords = {1, 0, 0};
  second.id = 1;
  pjrt::Device kind = second, coords = second, slice = second, process = second;
  kind.kind = "TPU v5p", coords.coords = {0, 1, 0}, slice.slice = 1, process.process = 1;
  const std::string plain = key({first, second});
  EXPECT_EQ(plain, key({first, second}));
  for (const pjrt::Device& other : {kind, coords, slice, process}) EXPECT_NE(plain, key({first, other}));
  EXPECT_EQ(plain, key({second, first})) << "the order is that of the options";
  EXPECT_THROW(key({first}), Error);
}

// P-12
TEST_F(Cache, PluginsAreKnownByTheirContent) {
  EXPECT_FALSE(is_cached(devices_));
  const std::string copy = folder_ + "/copy.so";
  fs::copy_file(devices_.client().plugin().path(), copy);
  const Devices same(pjrt::Client::open("cpu", {}, copy), Mesh::single());
  ASSERT_NE(same.client().plugin().path(), devices_.client().plugin().path());
  EXPECT_TRUE(is_cached(same));
  std::ofstream(copy, std::ios::app) << "another build";
  EXPECT_FALSE(is_cached(same));
  EXPECT_TRUE(is_cached(devices_));
}

TEST_F(Cache, HashesOfUnchangedFilesAreCached) {
  const ExecutableCache cache(folder_);
  const std::string a = folder_ + "/a", b = folder_ + "/b";
  write_file_atomic(a, "one");
  write_file_atomic(b, "one");
  const std::string hash = cache.hash_of_file(a);
  EXPECT_EQ(hash, content_hash("one"));
  EXPECT_EQ(cache.hash_of_file(b), hash);
  const std::string hash_file = folder_ + "/" + content_hash(a) + ".hash", text = read_file(hash_file);
  const std::string other(hash.size(), 'f');
  write_file_atomic(hash_file, text.substr(0, text.size() - hash.size()) + other);
  EXPECT_EQ(cache.hash_of_file(a), other) << "the file is not read again";
  write_file_atomic(hash_file, text.substr(0, text.size() - 1));
  EXPECT_EQ(cache.hash_of_file(a), hash) << "cut short";
  write_file_atomic(a, "two");  // same length, another inode
  EXPECT_EQ(cache.hash_of_file(a), content_hash("two"));
  const fs::file_time_type before = fs::last_write_time(a);
  std::ofstream(a) << "six";
  fs::last_write_time(a, before);
  EXPECT_EQ(cache.hash_of_file(a), content_hash("six")) << "as long and, by its time, as old";
  EXPECT_EQ(ExecutableCache("off").hash_of_file(a), content_hash("six"));
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

TEST_F(Cache, UnloadableEntryIsCompiledAgain) {
  build();
  const std::string key = entries().at(0).stem().string();
  ExecutableCache(folder_).put(key, "no executable, but hashed");
  EXPECT_EQ(ExecutableCache(folder_).get(key), "no executable, but hashed");
  const Program p = build();
  EXPECT_FALSE(p.report().from_cache);
  EXPECT_TRUE(build().report().from_cache);
}

TEST_F(Cache, UnwritableFolderIsNotAnError) {
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
