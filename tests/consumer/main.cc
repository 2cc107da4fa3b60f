// The gradient of x·x at (1, 2, 3), by the installed library.
#include <maxdiffusion/maxdiffusion.h>

#include <cstdio>
#include <exception>
#include <vector>

int main() {
  try {
    const md::Devices devices = md::Devices::open();
    const md::Shape shape{md::DType::f32, {3}};
    md::Graph g(devices.graph_options());
    const md::Tensor x = g.input("x", shape), y = md::sum(x * x);
    g.output("y", y);
    g.output("dx", md::grad(y, {x})[0]);
    const std::vector<float> values = {1, 2, 3};
    const auto out = md::evaluate(devices, g, {md::HostArray::of<float>(shape, values)});
    const std::vector<double> dx = out[1].to_doubles();
    std::printf("%s: y %g, dx %g %g %g\n", md::version(), out[0].to_doubles()[0], dx[0], dx[1], dx[2]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
