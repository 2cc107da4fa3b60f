// Collectives on all devices of the platform ($MD_TEST_HARDWARE; four virtual ones for the CPU), in f32, compared with
// the host.
#include <gtest/gtest.h>

#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/sharding.h"
#include "tests/one_device.h"

namespace md {
namespace {

SharedDevices& kAll = SharedDevices::add([] {
  if (test_hardware() == "cpu") return Devices::open("cpu", 4, {.ici_fsdp_parallelism = 4});
  const int64_t count = static_cast<int64_t>(one_device().client().devices().size());
  return Devices::open(test_hardware(), 1, {.ici_fsdp_parallelism = count});
});

/// Splits the rows of x over the devices in order, n each, and runs f on each device's rows.
HostArray on_all(const HostArray& x, const DimAxes& out, const std::function<Tensor(Tensor)>& f) {
  const Devices& devices = kAll.get();
  Graph g(devices.graph_options());
  const Tensor in = g.input("x", x.shape());
  g.output("y", manual_computation({in}, {{{"fsdp"}, {}}}, {out}, {"fsdp"},
                                   [&](const std::vector<Tensor>& v) { return std::vector<Tensor>{f(v[0])}; })[0]);
  const auto program = compile(devices, g, {.jax_cache_dir = "off"}, "collective");
  Array array = devices.put(x, program.input_sharding(0));
  return devices.get(program.run({&array})[0]);
}

class CollectivesOnDevice : public testing::Test {
 protected:
  CollectivesOnDevice() : n(kAll.get().count()), x(Shape{DType::f32, {n * n, 3}}) {
    auto v = x.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  }
  float at(int64_t row, int64_t column) const { return x.view<float>()[static_cast<size_t>(row * 3 + column)]; }
  void expect(const HostArray& y, const std::function<double(int64_t, int64_t)>& want) {
    for (int64_t r = 0; r < y.dims()[0]; ++r)
      for (int64_t c = 0; c < y.dims()[1]; ++c)
        ASSERT_EQ(y.view<float>()[static_cast<size_t>(r * y.dims()[1] + c)], want(r, c))
            << r << ", " << c << " of " << n;
  }
  int64_t n;
  HostArray x;
};

TEST_F(CollectivesOnDevice, SumOverAll) {
  expect(on_all(x, {{}, {}}, [](Tensor v) { return all_reduce_sum(v, {"fsdp"}); }), [&](int64_t r, int64_t c) {
    double total = 0;
    for (int64_t d = 0; d < n; ++d) total += at(d * n + r, c);
    return total;
  });
}

TEST_F(CollectivesOnDevice, GatherAndScatterAgain) {
  expect(on_all(x, {{"fsdp"}, {}}, [](Tensor v) { return reduce_scatter(all_gather(v, "fsdp", 0), "fsdp", 0); }),
         [&](int64_t r, int64_t c) { return static_cast<double>(n) * at(r, c); });
}

TEST_F(CollectivesOnDevice, PassOnToTheNext) {
  expect(on_all(x, {{"fsdp"}, {}}, [](Tensor v) { return collective_permute(v, "fsdp", 1); }),
         [&](int64_t r, int64_t c) { return at((r - n + n * n) % (n * n), c); });
}

TEST_F(CollectivesOnDevice, ExchangeRows) {
  expect(on_all(x, {{"fsdp"}, {}}, [&](Tensor v) { return all_to_all(v, "fsdp", 0, 0); }),
         [&](int64_t r, int64_t c) { return at(r % n * n + r / n, c); });
}

}  // namespace
}  // namespace md
