// The bucket server of a test program, set up in environment variables, and helpers for error messages.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <chrono>
#include <cstdlib>
#include <functional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/storage/storage.h"
#include "tests/bucket_server.h"

namespace md {

inline const std::string kFiles = MD_SOURCE_DIR "/tests/golden/data/files";

/// Lives as long as the program: remote storages are closed before the server.
class World : public testing::Environment {
 public:
  void SetUp() override {
    server = std::make_unique<BucketServer>();
    for (const auto& [name, value] :
         std::vector<std::pair<const char*, std::string>>{{"AWS_ENDPOINT_URL", "http://" + server->address()},
                                                          {"AWS_ACCESS_KEY_ID", "reader"},
                                                          {"AWS_SECRET_ACCESS_KEY", "hush-environment"},
                                                          {"AWS_EC2_METADATA_DISABLED", "true"},
                                                          {"STORAGE_EMULATOR_HOST", "http://" + server->address()},
                                                          {"no_proxy", "127.0.0.1"}})
      ::setenv(name, value.c_str(), 1);
    server->put_files("files", "data", kFiles);
    // ArrayRecord files are stored compressed.
    gzFile zipped = gzopen((kFiles + "/zstd.array_record.gz").c_str(), "rb");
    std::string bytes(1 << 20, '\0');
    bytes.resize(static_cast<size_t>(std::max(gzread(zipped, bytes.data(), 1 << 20), 0)));
    gzclose(zipped);
    write_file_atomic(folder / "zstd.array_record", bytes);
    server->put("files", "data/zstd.array_record", bytes);
    scope = std::make_unique<RemoteScope>();
  }
  void TearDown() override {
    scope.reset();
    server.reset();
  }
  std::unique_ptr<BucketServer> server;
  std::unique_ptr<RemoteScope> scope;
  TemporaryFolder folder;
};
inline World* const world = static_cast<World*>(testing::AddGlobalTestEnvironment(new World));
inline BucketServer& server() { return *world->server; }

struct Failure {
  std::string text;
  double seconds;
};
inline Failure failure_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io) << e.what();
    EXPECT_EQ(std::string(e.what()).find("hush"), std::string::npos) << e.what();
    return {e.what(), seconds()};
  }
  return {"no error", seconds()};
}
inline void expect_says(const Failure& f, std::initializer_list<std::string> words) {
  for (const std::string& w : words) EXPECT_NE(f.text.find(w), std::string::npos) << "not '" << w << "':\n" << f.text;
}

}  // namespace md
