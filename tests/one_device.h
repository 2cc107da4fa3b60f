// Devices that the tests of one program share: opened on first use, closed when the last test is over. Not by a
// static's destructor: after the end of main a plugin's threads may drop their last reference to a program while the
// plugin's own statics go, which aborts the process.
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
  /// Owned by GoogleTest. To be called before main, as the initialiser of a variable.
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

/// The hardware of $MD_TEST_HARDWARE: gpu or tpu where these tests are to run on one (`maxdiffusion
/// accelerator_check`).
inline std::string test_hardware() {
  const char* named = std::getenv("MD_TEST_HARDWARE");
  return named && *named ? named : "cpu";
}

inline SharedDevices& kOneDevice = SharedDevices::add([] { return Devices::open(test_hardware()); });

/// One device for tests that run graphs: of the CPU, but see test_hardware().
inline const Devices& one_device() { return kOneDevice.get(); }

}  // namespace md
