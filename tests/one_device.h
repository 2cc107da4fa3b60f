// Devices shared by the tests of one program: opened on first use, closed after the last test. A static destructor must
// not close them: after main, a plugin's threads may release their last reference to a program while the plugin's
// statics are destroyed, which aborts the process.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

class SharedDevices : public testing::Environment {
 public:
  /// GoogleTest owns the result. Call it before main, in a variable's initializer.
  static SharedDevices& add(std::function<Devices()> open) {
    auto* shared = new SharedDevices(std::move(open));
    testing::AddGlobalTestEnvironment(shared);
    return *shared;
  }
  const Devices& get() {
    if (!devices_) devices_.emplace(open_());
    return *devices_;
  }
  void TearDown() override { devices_.reset(); }

 private:
  explicit SharedDevices(std::function<Devices()> open) : open_(std::move(open)) {}
  std::function<Devices()> open_;
  std::optional<Devices> devices_;
};

/// The hardware in $MD_TEST_HARDWARE: gpu or tpu if these tests run on one (`maxdiffusion accelerator_check`), else the
/// CPU.
inline std::string test_hardware() {
  const char* named = std::getenv("MD_TEST_HARDWARE");
  return named && *named ? named : "cpu";
}

inline SharedDevices& kOneDevice = SharedDevices::add([] { return Devices::open(test_hardware()); });

/// One device for tests that run graphs: a CPU unless test_hardware() says otherwise.
inline const Devices& one_device() { return kOneDevice.get(); }

}  // namespace md
